"""Options that several subcommands share, each written once."""

from __future__ import annotations

from typing import Annotated

import typer

from moespeq.cli.manual import OUTPUT

__all__ = [
    "DRAFTING",
    "MEMORY",
    "PROMPT",
    "SAMPLING",
    "BaseMemory",
    "Chat",
    "ConvertTo",
    "CtxSize",
    "Device",
    "DeviceMemory",
    "HostMemory",
    "IgnoreEos",
    "Images",
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
    "PrefillRows",
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

PROMPT, SAMPLING, DRAFTING, MEMORY = "Prompt", "Sampling", "Drafting", "Memory and device"

Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="speculative|on_demand",
        help="on_demand is the baseline of other engines: no draft, LRU slots, one row.",
        rich_help_panel=DRAFTING,
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A checkpoint folder, a hub id such as org/name, or a store, which `prepare` makes."
    ),
]
Prompt = Annotated[
    str, typer.Option("--prompt", "-p", help="The prompt; - reads it from standard input.", rich_help_panel=PROMPT)
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Send the prompt through the model's chat template.", rich_help_panel=PROMPT)
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        "--image",
        metavar="PATH",
        help="An image in front of the prompt, for models that take images; implies --chat; may be given again.",
        rich_help_panel=PROMPT,
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System message; implies --chat.", rich_help_panel=PROMPT)]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on one line to stdout; all else to stderr.", rich_help_panel=OUTPUT
    ),
]
K = Annotated[
    str,
    typer.Option(
        "--k",
        metavar="auto|INT",
        help="Drafted tokens a round: auto (measured), or 0 (plain decoding) to rows - 1.",
        rich_help_panel=DRAFTING,
    ),
]
KMin = Annotated[
    int, typer.Option("--k-min", help="The shortest draft that k auto may choose.", rich_help_panel=DRAFTING)
]
ItlBudget = Annotated[
    float | None,
    typer.Option(
        "--itl-budget",
        metavar="MS",
        help="The longest wait between two bursts of tokens, one round, that k auto may choose; --k-min wins.",
        rich_help_panel=DRAFTING,
    ),
]
Lookahead = Annotated[
    int | None,
    typer.Option(
        "--lookahead",
        metavar="STEPS",
        help="Draft steps of a round whose routes are fetched for; by default all.",
        rich_help_panel=DRAFTING,
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(
        "--rows",
        help="Rows of every verify pass: 17, 33 or 65; 1 never drafts. By default 33 on a GPU, else 17. "
        "Texts are equal for equal rows.",
        rich_help_panel=DRAFTING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda",
        help="Where the model runs; auto is a GPU where there is one.",
        rich_help_panel=MEMORY,
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        help="All that the engine holds on the device, such as 12GiB. By default what all experts take, or 80 % "
        "of free memory (95 % of a GPU's).",
        rich_help_panel=MEMORY,
    ),
]
BaseMemory = Annotated[
    str | None,
    typer.Option(
        "--base-memory",
        metavar="SIZE",
        help="How much of that the INT4 base takes; the draft does without the rest. By default all of it where it "
        "fits, else none, or with --k most of the room.",
        rich_help_panel=MEMORY,
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        help="Host memory for records. By default all of them with a GPU, where 85 % of free memory hold them; else "
        "none.",
        rich_help_panel=MEMORY,
    ),
]
ConvertTo = Annotated[
    str | None,
    typer.Option(
        "--convert-to",
        metavar="bf16",
        help="Round fp32 or fp16 experts of a checkpoint to bf16 when it is prepared; fp32 is refused without it.",
        rich_help_panel=MEMORY,
    ),
]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "--ctx-size",
        help="Context in tokens; KV cache and workspace follow from it. By default the model's, at most 4096.",
        rich_help_panel=MEMORY,
    ),
]
PrefillRows = Annotated[
    int | None,
    typer.Option(
        "--prefill-rows",
        help="Prompt tokens that one pass takes, by default 8192; fewer need less workspace. `serve` takes 512. "
        "An image is one pass.",
        rich_help_panel=MEMORY,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        help="At most this many new tokens; by default the model's limit, else 256.",
        rich_help_panel=SAMPLING,
    ),
]
MinNewTokens = Annotated[
    int | None, typer.Option("--min-new-tokens", help="No end before this many new tokens.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; by default the model's.", rich_help_panel=SAMPLING)
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the likeliest tokens of this total share.", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Drop tokens below this share of the likeliest.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty",
        help="Makes tokens less likely that were used already; 1 is off.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; may be given again.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="With it a sampled text repeats, whatever k is; by default drawn and reported.",
        rich_help_panel=SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.", rich_help_panel=SAMPLING)
]
LinkBandwidth = Annotated[
    str | None,
    typer.Option(
        "--link-bandwidth",
        metavar="SIZE",
        help="Pace reads to this many bytes a second, such as 25GB.",
        rich_help_panel=MEMORY,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="CPU threads that multiply. By default the physical cores, 1 for small experts. Texts are equal for equal "
        "threads.",
        rich_help_panel=MEMORY,
    ),
]


def parse_k(text: str) -> int | str:
    """`auto` or a whole number; anything else goes on as it is and is refused with the allowed range."""
    try:
        return int(text)
    except ValueError:
        return text
