"""`moespeq verify`: every checksum of a store and, against its checkpoint, every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq.cli import options

__all__ = ["command"]


def command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The store to check.")],
    *,
    against: Annotated[
        Path | None, typer.Option("--against", help="The checkpoint to compare with, bit by bit.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Check every checksum of a store, and every bit against its checkpoint.

    Example: moespeq verify olmoe.moespeq
    """
    from dataclasses import asdict

    from moespeq.cli.console import out as console
    from moespeq.cli.console import print_json, progress_bar, start_torch
    from moespeq.model_place import require_store

    require_store(store)
    start_torch()
    from moespeq.prepare import verify_store

    with progress_bar() as bar:
        report = verify_store(store, against=against, progress=bar)
    if json:
        print_json({"store": str(store), "intact": True, **asdict(report)})
        return
    console.print(f"{store} is intact: {report.summary()}")
