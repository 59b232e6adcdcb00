"""Options that several subcommands share, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "EXIT_INTERRUPTED",
    "CtxSize",
    "DeviceMemory",
    "HostMemory",
    "IgnoreEos",
    "Json",
    "K",
    "LinkBandwidth",
    "MaxNewTokens",
    "Model",
    "Rows",
    "Seed",
    "Threads",
    "parse_k",
]

EXIT_INTERRUPTED = 130

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A store, a checkpoint folder, or a hub id such as org/name.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line to stdout; all else to stderr.")]
K = Annotated[
    str,
    typer.Option("--k", metavar="auto|INT", help="Draft length: auto, or 0 (plain decoding) to rows - 1."),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows", help="Row bucket of a verify pass: 17, 33 or 65; 1 never drafts. Results are equal for equal rows."
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda", help="Where the model runs; auto is a GPU where there is one."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--device-memory", metavar="SIZE", help="Memory of the device, such as 12GiB; by default auto."),
]
BaseMemory = Annotated[
    str | None,
    typer.Option("--base-memory", metavar="SIZE", help="Part of it for the INT4 base; by default auto."),
]
HostMemory = Annotated[
    str | None,
    typer.Option("--host-memory", metavar="SIZE", help="Host memory for records; by default auto."),
]
CtxSize = Annotated[int | None, typer.Option("--ctx-size", help="Context length in tokens; by default auto.")]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", "-n", help="At most this many new tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Key of all randomness; by default drawn and reported.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")]
LinkBandwidth = Annotated[
    str | None,
    typer.Option("--link-bandwidth", metavar="SIZE", help="Pace reads to this many bytes a second, such as 25GB."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads that multiply; by default auto.")]


def parse_k(text: str) -> int | str:
    """`auto` or a whole number; anything else goes on as it is and is refused with the allowed range."""
    try:
        return int(text)
    except ValueError:
        return text
