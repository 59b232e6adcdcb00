"""`moespeq profile`: measure this machine, and a model on it, for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from moespeq.plan.profile import MachineProfile

__all__ = ["command"]


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A store or checkpoint to time too."),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; by default in the cache folder.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="What computes.")] = "auto",
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help="A row bucket to time verify with; may be given again.")
    ] = None,
    device_memory: options.DeviceMemory = None,
    json: options.Json = False,
) -> None:
    """Measure copies by block size, disk reads and, with MODEL, draft, verify and decoding."""
    import json as json_format

    from moespeq.cli.console import err, print_json
    from moespeq.cli.console import out as console
    from moespeq.config import ROW_BUCKETS
    from moespeq.plan.profile import default_profile_path
    from moespeq.profiling import choose_device, profile_machine

    chosen = choose_device(device)
    profile = profile_machine(
        model,
        device=chosen,
        rows=rows or (ROW_BUCKETS if chosen == "cuda" else ROW_BUCKETS[:1]),
        say=lambda line: err.print(f"measuring {line}", style="dim"),
        device_memory=device_memory,
    )
    path = out if out is not None else default_profile_path()
    profile.save(path)
    if json:
        print_json(json_format.loads(profile.to_json()))
        return
    for line in _lines(profile):
        console.print(line)
    console.print(f"written to {path}")


def _lines(profile: MachineProfile) -> list[str]:
    """The profile for people."""
    from moespeq.config import format_bytes

    lines = [f"device              {profile.device}"]
    for name, rates in (("pinned", profile.pinned_copy), ("pageable", profile.pageable_copy)):
        lines += [f"{name:<8} {format_bytes(block):>10} {rate / 1e9:8.2f} GB/s" for block, rate in rates.items()]
    for rate in profile.disk:
        way = "direct" if rate.is_direct else "through the page cache"
        lines.append(f"disk     {rate.num_threads:>2} at a time {rate.bytes_per_s / 1e9:8.2f} GB/s, {way}")
    if profile.model is not None:
        lines.append(f"draft               {1e3 * profile.model.draft_s_per_tok:8.2f} ms a token")
        for rows, verify_s in profile.model.verify_s.items():
            lines.append(f"verify   {rows:>3} rows   {1e3 * verify_s:8.2f} ms")
        lines.append(f"decode              {profile.model.decode_bytes_per_s / 1e9:8.2f} GB/s of bf16")
    return lines
