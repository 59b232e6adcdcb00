"""`moespeq ablation`: from offloading on demand to moespeq, one thing at a time."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from moespeq.ablation import AblationRow

__all__ = ["command"]


def command(
    model: options.Model,
    prompt: options.Prompt,
    *,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens of every answer.")] = 128,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Draft length of the steps that fix it; by default rows - 1.")
    ] = None,
    rows: options.Rows = None,
    ctx_size: options.CtxSize = None,
    device: options.Device = "auto",
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    link_bandwidth: options.LinkBandwidth = None,
    json: options.Json = False,
) -> None:
    """Measure what each part of moespeq adds.

    One prompt is answered five times: on demand, then with draft, prefetch, governor and nested records added; and
    once more under each policy at one depth. On a CPU, MODEL is a checkpoint.

    Example: moespeq ablation allenai/OLMoE-1B-7B-0924 -p "Once upon a time" -n 64
    """
    from moespeq.cli.console import err, out, print_json, progress_bar, start_torch
    from moespeq.cli.prompts import read_prompt
    from moespeq.cli.refusals import refuse_at_once

    common: dict[str, Any] = {
        "rows": rows,
        "ctx_size": ctx_size,
        "device": device,
        "device_memory": device_memory,
        "host_memory": host_memory,
        "link_bytes_per_s": link_bandwidth,
    }
    refuse_at_once(model, common)
    text = read_prompt(prompt)
    start_torch()
    from moespeq.ablation import POLICY_STEPS, run_ablation, run_policies, steps_of

    steps, num_steps = count(1), len(steps_of(1)) + len(POLICY_STEPS)
    with progress_bar() as bar:
        asked: dict[str, Any] = {
            "k": k,
            "max_new_tokens": max_new_tokens,
            "common": {name: value for name, value in common.items() if value is not None},
            "progress": bar,
            "tokens": bar.counting("tokens"),
            "on_step": lambda name: err.print(f"{next(steps)} of {num_steps}: {name}", style="dim"),
        }
        measured = list(run_ablation(model, text, **asked))
        policies = run_policies(model, text, **asked)
    if json:
        bounds = {name: round(getattr(policies.bounds, name)) for name in ("no_cache", "belady")}
        print_json(
            {
                "rows": [_to_json(row) for row in measured],
                "policies": [_to_json(row) for row in policies.rows],
                "bound_bytes_per_tok": bounds,
            }
        )
        return
    out.print(_table("What each step adds", measured))
    out.print(_sentence(measured))
    out.print(_table("Policies at one depth, nested records", policies.rows))
    out.print(
        f"For the rounds of ours Belady's rule would move {policies.bounds.belady / 1e6:.3g} MB a token, "
        f"and no cache {policies.bounds.no_cache / 1e6:.3g}."
    )


def _to_json(row: AblationRow) -> dict[str, Any]:
    stats = row.result.stats
    return {
        "name": row.step.name,
        "num_slots": row.num_slots,
        "k_per_round": list(stats.k_per_round),
        "committed_per_round": round(stats.committed_per_round, 4),
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "bytes_per_tok": round(row.bytes_per_tok),
        "shares": {name: round(share, 4) for name, share in row.shares.items()},
        "tokens": list(row.result.tokens),
    }


def _table(title: str, rows: Sequence[AblationRow]) -> Table:
    """A column for each engine: five narrow ones fit where twelve do not."""
    from statistics import fmean

    from rich.table import Table

    from moespeq.cli.console import column

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row.step.name, justify="right")
    stats, shares = [row.result.stats for row in rows], [row.shares for row in rows]
    table.add_row("slots", *(str(row.num_slots) for row in rows))
    table.add_row("k, mean", *(f"{fmean(each.k_per_round or [0]):.1f}" for each in stats))
    table.add_row("committed a round", *(f"{each.committed_per_round:.2f}" for each in stats))
    for name, label in (("hits", "hit"), ("late", "late"), ("misses", "miss")):
        table.add_row(f"experts: {label}", *(f"{share[name]:.0%}" for share in shares))
    table.add_row("bytes wasted", *(f"{share['wasted']:.0%}" for share in shares))
    table.add_row("MB a token", *column([row.bytes_per_tok / 1e6 for row in rows]))
    table.add_row("time stalled", *(f"{share['stall']:.0%}" for share in shares))
    table.add_row("tokens/s", *(f"{each.tokens_per_s:.2f}" for each in stats))
    table.add_row("speedup", *(f"{rows[0].seconds_per_tok / row.seconds_per_tok:.2f}x" for row in rows))
    return table


def _sentence(rows: Sequence[AblationRow]) -> str:
    """What the table says of texts: on demand has one row a pass, all others the same row bucket."""
    texts = {row.result.tokens for row in rows[1:]}
    if len(texts) > 1:
        return "The texts of the engines with equal rows are DIFFERENT: this is a bug, please report it."
    same = "the same" if rows[0].result.tokens in texts else "another one, for a pass of one row rounds differently"
    return f"The four engines with equal rows gave one text, token for token; on demand gave {same}."
