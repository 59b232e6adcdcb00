"""`moespeq demo`: the packaged model answers real questions in three passes, and a table compares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options
from moespeq.cli.options import parse_k

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from moespeq.demo.comparison import PassResult

__all__ = ["command"]


def command(
    *,
    questions: Annotated[int, typer.Option("--questions", min=1, max=100, help="How many test questions.")] = 2,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="New tokens a question.")] = 96,
    k: options.K = "16",
    rows: options.Rows = None,
    device_memory: Annotated[
        str,
        typer.Option("--device-memory", metavar="SIZE", help="Memory of each pass; holds a part of the experts."),
    ] = "7MiB",
    host_memory: options.HostMemory = None,
    link_bandwidth: Annotated[
        str, typer.Option("--link-bandwidth", metavar="SIZE", help="Bytes a second of the paced runs.")
    ] = "2.5MB",
    seed: options.Seed = None,
    json: options.Json = False,
) -> None:
    """Compare three ways to decode in the same small memory.

    The packaged model answers GSM8K test questions by plain decoding, by speculation and on demand, as fast as the disk
    goes and on a paced link.

    Example: moespeq demo --questions 1 --max-new-tokens 32
    """
    from moespeq.cli.console import err, out, print_json, progress_bar, start_torch, text_stream
    from moespeq.cli.refusals import refuse_at_once
    from moespeq.config import LoadOptions, parse_bytes
    from moespeq.decode.params import SamplingParams

    console, text_to = err if json else out, text_stream(has_json=json)
    bandwidth_bytes_per_s = parse_bytes(link_bandwidth)
    sampling: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": seed}
    SamplingParams(**sampling)  # whatever is wrong is refused before anything is printed
    common = {"device_memory": device_memory, "host_memory": host_memory, "ctx_size": 384}
    speculative = {**common, "k": parse_k(k), "rows": rows}
    refuse_at_once(None, {**speculative, "link_bytes_per_s": bandwidth_bytes_per_s})
    start_torch()
    from moespeq.decode.planning import plan_of
    from moespeq.demo.assets import MODEL_FOLDER, read_questions
    from moespeq.demo.comparison import run_pass
    from moespeq.nested import Layout
    from moespeq.prepare import prepare_cached
    from moespeq.store import Store

    asked = read_questions(questions)
    kinds: list[tuple[str, Layout, dict[str, Any]]] = [
        ("plain (k=0)", Layout.CODE_WIDTH, {**speculative, "k": 0}),
        (f"speculative (k={k})", Layout.CODE_WIDTH, speculative),
        ("on demand (LRU)", Layout.PLAIN, {**common, "mode": "on_demand"}),
    ]
    stores = {}
    for _, layout, mode in kinds:
        load_options = LoadOptions.from_mapping({**mode, "link_bytes_per_s": bandwidth_bytes_per_s})
        stores[layout] = prepare_cached(MODEL_FOLDER, layout=layout)
        with Store.open(stores[layout]) as store:
            plan_of(store, load_options)

    def on_text(text: str) -> None:
        text_to.write(text)
        text_to.flush()

    for number, question in enumerate(asked, start=1):
        console.print(f"Question {number}: {question.question} [dim](answer: {question.answer})[/]", markup=True)
    passes: list[PassResult] = []
    for name, layout, mode in kinds:
        console.print(f"\n[bold]{name}[/]", markup=True)
        with progress_bar() as bar:
            passes.append(
                run_pass(
                    name,
                    stores[layout],
                    asked,
                    link_bytes_per_s=float(bandwidth_bytes_per_s),
                    on_text=on_text,
                    progress=bar.counting("tokens"),
                    options=mode,
                    sampling=sampling,
                )
            )
    if json:
        print_json(_to_json(passes))
        return
    out.print(_table(passes, f"{bandwidth_bytes_per_s / 1e6:g} MB/s", device_memory))
    same = "identical, token for token" if _is_identical(passes) else "DIFFERENT: this is a bug, please report it"
    out.print(f"The texts of plain and speculative decoding are {same}.")


def _is_identical(passes: Sequence[PassResult]) -> bool:
    """Whether the first two passes gave the same tokens, paced and unpaced."""
    plain, speculative = passes[0], passes[1]
    paced = [result.tokens for result in speculative.paced]
    return plain.tokens == speculative.tokens == paced


def _to_json(passes: Sequence[PassResult]) -> dict[str, Any]:
    """The keys of `run --json` for the speculative pass, all answers together, and the comparison."""
    speculative, on_demand = passes[1], passes[2]
    names = ("rounds", "drafted", "accepted", "hits", "late", "misses", "link_bytes", "wasted_bytes")
    return {
        "text": "\n\n".join(result.text for result in speculative.unpaced),
        "tokens": [token for tokens in speculative.tokens for token in tokens],
        "finish_reason": speculative.unpaced[-1].finish_reason.value,
        "identical": _is_identical(passes),
        **{name: speculative.total(name) for name in names},
        "committed_per_round": round(speculative.committed_per_round, 4),
        "link_bytes_on_demand": on_demand.total("link_bytes"),
        "routes": speculative.routes,
        "rows": speculative.unpaced[0].stats.rows,
        "passes": [result.to_json() for result in passes],
    }


def _table(passes: Sequence[PassResult], bandwidth: str, device_memory: str) -> Table:
    from rich.table import Table

    from moespeq.demo.comparison import total_s

    table = Table(title=f"{device_memory} of device memory, records from disk", title_justify="left")
    table.add_column("")
    for result in passes:
        table.add_column(result.name, justify="right")

    def add(name: str, cells: list[str]) -> None:
        table.add_row(name, *cells)

    routes = passes[1].routes
    total = max(1, sum(routes.values()))
    add("expert slots", [f"{result.num_slots} of 128" for result in passes])
    add("tokens", [str(result.num_tokens) for result in passes])
    add("committed per round", [f"{result.committed_per_round:.2f}" for result in passes])
    add("drafts accepted", ["-", f"{passes[1].acceptance:.1%}", "-"])
    add("draft's routes: exact", ["-", f"{routes['exact'] / total:.1%}", "-"])
    add("  same set", ["-", f"{routes['same_set'] / total:.1%}", "-"])
    add("  wrong", ["-", f"{routes['wrong'] / total:.1%}", "-"])
    add("link KB per token", [f"{result.link_bytes_per_tok / 1e3:.1f}" for result in passes])
    reference_s, reference_paced_s = total_s(passes[2].unpaced), total_s(passes[2].paced)
    add("seconds, unpaced", [_seconds(total_s(result.unpaced), reference_s) for result in passes])
    add(f"seconds at {bandwidth}", [_seconds(total_s(result.paced), reference_paced_s) for result in passes])
    return table


def _seconds(value_s: float, reference_s: float) -> str:
    """Seconds, and how many times faster than on demand."""
    return f"{value_s:.1f} ({reference_s / value_s:.2f}x)"
