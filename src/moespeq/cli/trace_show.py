"""`moespeq trace show`: what a routing trace shows, as tables, figures or one JSON line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from moespeq.replay import RoutingTrace
    from moespeq.replay.study import TraceStudy

__all__ = ["command"]


def command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A routing trace.")],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Draw figures there and write study.json.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Show how a model routes, and how well its draft foretells it.

    Seven tables, a sentence each: entropy, reuse, distinct experts, hit rates of LRU, LFU and Belady's rule, and the
    draft's fidelity by layer and step. With --out also as figures, which need matplotlib.

    Example: moespeq trace show run.trace --out figures
    """
    from moespeq.cli.console import err, note_new_folder, print_json
    from moespeq.figures.canvas import require_matplotlib
    from moespeq.replay import RoutingTrace
    from moespeq.replay.findings import findings
    from moespeq.replay.study import study_trace

    recorded = RoutingTrace.read(trace)
    if out is not None:  # what would fail at the end fails now
        require_matplotlib()
        note_new_folder(out)
        out.mkdir(parents=True, exist_ok=True)
    with err.status(f"studying {len(recorded.positions)} tokens"):
        study = study_trace(recorded)
        said = findings(study)
    files = [] if out is None else _write(recorded, study, said, out)
    if json:
        print_json(_facts(study, said) | {"files": [str(path) for path in files]})
        return
    _print(study, said)
    if files:
        err.print(f"wrote {len(files)} files to {out}", style="dim")


def _facts(study: TraceStudy, said: dict[str, str]) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(study) | {"findings": said}


def _write(recorded: RoutingTrace, study: TraceStudy, said: dict[str, str], folder: Path) -> list[Path]:
    import json as json_format

    from moespeq.figures.roofline import draw_roofline
    from moespeq.figures.routing import draw_study
    from moespeq.whole_file import write_whole

    facts = folder / "study.json"
    write_whole(facts, json_format.dumps(_facts(study, said), indent=1) + "\n")
    roofline = folder / "roofline.svg"
    draw_roofline(recorded, roofline)
    return [*draw_study(study, said, folder), roofline, facts]


def _print(study: TraceStudy, said: dict[str, str]) -> None:
    from moespeq.cli.console import out as console
    from moespeq.cli.trace_tables import tables

    console.print(
        f"{study.model}: {study.num_positions} tokens, {study.num_layers} MoE layers of {study.num_experts} experts, "
        f"{study.top_k} a token; {study.cache_share:.0%} of all experts had slots.",
        soft_wrap=False,
    )
    for name, table in tables(study):
        console.print()
        console.print(table)
        console.print(said[name], soft_wrap=False)
