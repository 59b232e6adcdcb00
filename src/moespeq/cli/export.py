"""`moespeq export`: the checkpoint back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq.cli import options

__all__ = ["command"]


def command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The store.")],
    out: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write; files that are there and equal stay.")
    ],
    *,
    json: options.Json = False,
) -> None:
    """Write the checkpoint back that a store was made from.

    Every file is byte-identical to the source and checked against its SHA-256. Interrupted, it goes on when run again.

    Example: moespeq export olmoe.moespeq olmoe-checkpoint
    """
    from moespeq.cli.console import note_new_folder, print_json, progress_bar, resumable, start_torch
    from moespeq.cli.console import out as console
    from moespeq.config import format_count
    from moespeq.model_place import require_store

    require_store(store)
    start_torch()
    from moespeq.prepare import export_checkpoint

    note_new_folder(out)
    there = {path.name for path in out.iterdir() if path.is_file()} if out.is_dir() else set()
    with progress_bar() as bar, resumable():
        folder = export_checkpoint(store, out, progress=bar)
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if json:
        print_json({"checkpoint": str(folder), "files": files})
    else:
        kept = len(there.intersection(files))
        kept_text = f"; {kept} of them there already, and left as they were" if kept else ""
        console.print(f"{folder}: {format_count(len(files), 'file')}, byte-identical to the source{kept_text}")
