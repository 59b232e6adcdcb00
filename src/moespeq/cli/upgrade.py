"""`moespeq upgrade`: a store of an older version becomes one of this version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moespeq.cli import options

__all__ = ["command"]


def command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The store.")],
    *,
    json: options.Json = False,
) -> None:
    """Change a store that an older version made into one that this version reads.

    Only its manifest is written again, in a moment and in one piece; no weight is read or changed. An older version
    cannot read the store afterwards.

    Example: moespeq upgrade olmoe.moespeq
    """
    from moespeq.cli.console import out as console
    from moespeq.cli.console import print_json
    from moespeq.store.manifest import SCHEMA
    from moespeq.store.upgrade import upgrade_store

    found = upgrade_store(store)
    if json:
        print_json({"store": str(store), "schema": SCHEMA, "schema_before": SCHEMA if found is None else found})
    elif found is None:
        console.print(f"{store} has schema {SCHEMA} already")
    else:
        console.print(f"{store}: from schema {found} to {SCHEMA}")
