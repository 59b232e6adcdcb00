"""`moespeq trace record`: a routing trace of a real run."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options
from moespeq.cli.options import parse_k

if TYPE_CHECKING:
    from moespeq.decode.recording import Recording

__all__ = ["command"]


def command(
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="TRACE", help="The trace to write, a new file.")],
    prompt: options.Prompt,
    *,
    chat: options.Chat = False,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
    ignore_eos: options.IgnoreEos = False,
    k: options.K = "auto",
    lookahead: options.Lookahead = None,
    rows: options.Rows = None,
    ctx_size: options.CtxSize = None,
    device: options.Device = "auto",
    device_memory: options.DeviceMemory = None,
    base_memory: options.BaseMemory = None,
    host_memory: options.HostMemory = None,
    threads: options.Threads = None,
    link_bandwidth: options.LinkBandwidth = None,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", help="Also write the rounds' time line, for chrome://tracing."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Answer one prompt and record what was routed where.

    By the target, by the INT4 draft, and by each layer's router one layer early. The answer itself is in --json only.

    Example: moespeq trace record olmoe.moespeq --out run.trace -p "Once upon a time"
    """
    from moespeq.cli.console import out as console
    from moespeq.cli.console import print_json, progress_bar, start_torch
    from moespeq.cli.generation_text import rounds_text, speed_text
    from moespeq.cli.prompts import read_prompt, request_of
    from moespeq.cli.refusals import refuse_at_once, refuse_early
    from moespeq.config import LoadOptions, format_count
    from moespeq.errors import UsageError

    loading: dict[str, Any] = {
        "k": parse_k(k),
        "lookahead_tok": lookahead,
        "rows": rows,
        "ctx_size": ctx_size,
        "device": device,
        "device_memory": device_memory,
        "base_memory": base_memory,
        "host_memory": host_memory,
        "threads": threads,
        "link_bytes_per_s": link_bandwidth,
    }
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop) if stop else None,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
    }
    refuse_at_once(model, loading)
    text = read_prompt(prompt)
    start_torch()
    from moespeq.api import load
    from moespeq.decode.recording import record, require_draft
    from moespeq.decode.timeline import write_timeline

    require_draft(LoadOptions.from_mapping(loading))
    refuse_early(model, loading, sampling, chat=(system or "") if chat or system else None)
    _require_new_file(out, "--out")
    if timeline is not None:
        _require_new_file(timeline, "--timeline")
        if timeline.resolve() == out.resolve():
            raise UsageError(f"--out and --timeline are both {out}; give two files.")
    with progress_bar() as bar:
        engine = load(model, progress=bar, **loading)
    with engine:
        request = request_of(engine, text, chat=chat, system=system)
        with progress_bar() as bar:
            recording = record(engine, request, progress=bar.counting("tokens").update, **sampling)
    recording.trace.write(out)
    if timeline is not None:
        write_timeline(recording.times, timeline)
    if json:
        print_json(_summary(recording, out))
        return
    stats = recording.result.stats
    console.print(
        f"{out}: {format_count(len(recording.trace.positions), 'token')} in {format_count(stats.rounds, 'round')}, "
        f"{rounds_text(stats)}, {speed_text(stats.tokens_per_s)}; "
        f"look at it with `moespeq trace show {quote(str(out))}`"
    )


def _require_new_file(out: Path, option: str) -> None:
    """Refuse what cannot be written, before anything is loaded for it. Raises UsageError or StorageError."""
    from moespeq.cli.console import note_new_folder
    from moespeq.errors import UsageError
    from moespeq.plan.profile import require_writable
    from moespeq.store.output_path import require_reachable

    require_reachable(out)
    if out.exists():
        raise UsageError(f"{out} exists already; remove it, or choose another {option}.")
    note_new_folder(out)
    require_writable(out)


def _summary(recording: Recording, out: Path) -> dict[str, Any]:
    stats = recording.result.stats
    return {
        "trace": str(out),
        "size_bytes": out.stat().st_size,
        "positions": len(recording.trace.positions),
        "text": recording.result.text,
        "finish_reason": recording.result.finish_reason.value,
        "prompt_tokens": stats.prompt_tok,
        "rounds": stats.rounds,
        "committed_per_round": round(stats.committed_per_round, 4),
        "acceptance": None if stats.acceptance is None else round(stats.acceptance, 4),
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "link_bytes_per_s": round(recording.trace.header.link_bytes_per_s),
        "seed": stats.seed,
    }
