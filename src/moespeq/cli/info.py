"""`moespeq info`: what a store or checkpoint is and what it takes, without loading it."""

from __future__ import annotations

from typing import Annotated

import typer

from moespeq.cli import options

__all__ = ["command"]


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A store or a checkpoint folder.")],
    *,
    json: options.Json = False,
) -> None:
    """Describe a store or checkpoint."""
    from moespeq.cli.console import out, print_json
    from moespeq.config import format_bytes
    from moespeq.inspection import describe_model

    facts = describe_model(model)
    if json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        is_size = name.endswith("_bytes")
        label = name.removesuffix("_bytes").replace("_", " ")
        out.print(f"{label:<{width}}  {format_bytes(value) if is_size else value}")
