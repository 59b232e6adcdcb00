"""Options that several subcommands share, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "EXIT_INTERRUPTED",
    "BaseMemory",
    "Chat",
    "CtxSize",
    "Device",
    "DeviceMemory",
    "HostMemory",
    "IgnoreEos",
    "ItlBudget",
    "Json",
    "K",
    "KMin",
    "LinkBandwidth",
    "Lookahead",
    "MaxNewTokens",
    "MinNewTokens",
    "MinP",
    "Mode",
    "Model",
    "Prompt",
    "RepetitionPenalty",
    "Rows",
    "Seed",
    "Stop",
    "System",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "parse_k",
]

EXIT_INTERRUPTED = 130

Mode = Annotated[
    str,
    typer.Option("--mode", metavar="speculative|on_demand", help="on_demand is the baseline without a draft."),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A store, a checkpoint folder, or a hub id such as org/name.")
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads it from standard input.")]
Chat = Annotated[bool, typer.Option("--chat", help="Send the prompt through the model's chat template.")]
System = Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line to stdout; all else to stderr.")]
K = Annotated[
    str,
    typer.Option("--k", metavar="auto|INT", help="Draft length: auto, or 0 (plain decoding) to rows - 1."),
]
KMin = Annotated[int, typer.Option("--k-min", help="The shortest draft that k auto may choose.")]
ItlBudget = Annotated[
    float | None,
    typer.Option(
        "--itl-budget", metavar="MS", help="The longest wait between two bursts of tokens that k auto may cause."
    ),
]
Lookahead = Annotated[
    int | None,
    typer.Option("--lookahead", metavar="STEPS", help="Draft steps of a round that are fetched for; default: all."),
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
MinNewTokens = Annotated[int | None, typer.Option("--min-new-tokens", help="No end before this many.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy; by default the model's.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens of this total share.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens below this share of the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option("--repetition-penalty", help="1 is off.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be given again.")]
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
