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
        typer.Argument(metavar="MODEL", help="A store or checkpoint to time too."),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; by default in the cache folder.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="What computes.")] = "auto",
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help="A row bucket to time verify with; may be given again.")
    ] = None,
    device_memory: options.DeviceMemory = None,
    ctx_size: options.CtxSize = None,
    json: options.Json = False,
) -> None:
    """Measure this machine, and a model on it, for the planner.

    Copies by block size and disk reads; with MODEL also draft, verify and decoding. Every load reads the file in the
    cache folder. Times of other models that the file holds stay.

    Example: moespeq profile olmoe.moespeq
    """
    import json as json_format

    from moespeq.cli.console import err, note_new_folder, print_json, progress_bar, start_torch
    from moespeq.cli.console import out as console
    from moespeq.cli.refusals import refuse_at_once
    from moespeq.config import ROW_BUCKETS
    from moespeq.errors import UsageError
    from moespeq.plan.profile import MachineProfile, default_profile_path, require_writable

    if model is None and (rows or device_memory is not None or ctx_size is not None):
        raise UsageError("--rows, --device-memory and --ctx-size are those of a model that is timed; give MODEL too.")
    for bucket in rows or (None,):
        refuse_at_once(model, {"device": device, "rows": bucket, "device_memory": device_memory, "ctx_size": ctx_size})
    start_torch()
    from moespeq.profiling import choose_device, device_name, profile_machine

    chosen, path = choose_device(device), out if out is not None else default_profile_path()
    if out is not None:
        note_new_folder(out)
    require_writable(path)
    earlier = MachineProfile.load(path)
    if earlier is not None and out is None and earlier.device != device_name(chosen):
        raise UsageError(f"{path} is the profile of {earlier.device}; give --out to write another one's elsewhere.")
    with progress_bar() as bar:
        measured = profile_machine(
            model,
            device=chosen,
            rows=rows or (ROW_BUCKETS[1:] if chosen == "cuda" else ROW_BUCKETS[1:2]),
            say=lambda line: err.print(f"measuring {line}", style="dim"),
            progress=bar,
            device_memory=device_memory,
            ctx_size=ctx_size,
        )
    profile = measured if earlier is None else measured.with_models_of(earlier)
    profile.save(path)
    if earlier is not None:
        err.print(_what_became_of(earlier, profile, measured), style="dim")
    if json:
        print_json(json_format.loads(profile.to_json()))
        return
    for line in _lines(profile):
        console.print(line)
    console.print(f"written to {path}")


def _what_became_of(earlier: MachineProfile, profile: MachineProfile, measured: MachineProfile) -> str:
    """What the file held before, and still holds."""
    if earlier.device != measured.device:
        return f"replaced a profile of {earlier.device}"
    kept = [times.model for times in profile.models if measured.times_of(times.model) is None]
    return f"kept the times of {', '.join(kept)}, measured earlier" if kept else "replaced the earlier profile"


def _lines(profile: MachineProfile) -> list[str]:
    """The profile for people."""
    from moespeq.config import format_bytes

    lines = [f"device              {profile.device}"]
    for name, rates in (("pinned", profile.pinned_copy), ("pageable", profile.pageable_copy)):
        lines += [f"{name:<8} {format_bytes(block):>10} {rate / 1e9:8.2f} GB/s" for block, rate in rates.items()]
    for rate in profile.disk:
        way = "direct" if rate.is_direct else "through the page cache"
        lines.append(f"disk     {rate.num_threads:>2} at a time {rate.bytes_per_s / 1e9:8.2f} GB/s, {way}")
    for model in profile.models:
        lines.append(f"model               {model.model}")
        lines.append(f"draft               {1e3 * model.draft_s_per_tok:8.2f} ms a token")
        lines += [f"verify   {rows:>3} rows   {1e3 * verify_s:8.2f} ms" for rows, verify_s in model.verify_s.items()]
        lines.append(f"decode              {model.decode_bytes_per_s / 1e9:8.2f} GB/s of bf16")
    return lines
