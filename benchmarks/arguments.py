"""What run.py takes, checked before anything is loaded: what is wrong is one sentence, exit code 2.

A *smoke* run, on a CPU or of the packaged demo model, shows that the script runs and measures nothing anybody should
read: it writes into the work folder, never where report.py reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from moespeq.config import parse_bytes
from moespeq.errors import UsageError
from moespeq.nested import Layout
from phases import MODEL_CONTEXT_TOK, PHASES
from result_file import RESULTS
from rows import AS_IS, ROWS
from session import Options
from shapes import SHAPES


@dataclass(frozen=True, slots=True)
class Call:
    """One call of run.py."""

    options: Options
    phases: Sequence[str]
    out: Path
    commit: str | None
    may_mix_commits: bool


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}.\n")


def parse(parser: Parser, arguments: Sequence[str] | None) -> Call:
    """The call that `arguments` describe. Exits with one sentence where they are wrong."""
    args = parser.parse_args(arguments)
    shape = SHAPES[args.shape].cut_to(args.layers)
    for path, is_there, what in (
        (args.seed, args.seed.is_dir(), "--seed: no folder"),
        (args.data, args.data.is_file(), "--data: no file"),
        (args.work, not args.work.exists() or args.work.is_dir(), "--work: no folder"),
    ):
        if not is_there:
            parser.error(f"argument {what} {path}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible; with --device cpu the script runs, and measures nothing worth keeping")
    left_out = {name: "not on a CPU" for name in args.rows if args.device == "cpu" and ROWS[name].needs_gpu}
    rows = [name for name in args.rows if name not in left_out]
    if not rows:
        parser.error(f"none of the rows {', '.join(args.rows)} runs on a CPU; --rows nested does")
    options = Options(
        shape=shape,
        seed=args.seed,
        data=args.data,
        work=args.work,
        device=args.device,
        budget_bytes=shape.budget_bytes if args.budget is None else args.budget,
        rows=rows,
        left_out=left_out,
        links=args.links if AS_IS in args.links else [AS_IS, *args.links],
        repetitions=args.repetitions,
        new_tok=args.new_tokens,
        ttft_tok=args.ttft,
        identity=args.identity,
        identity_budget_bytes=args.identity_budget,
        accelerate_tok=args.accelerate_tokens,
        context_tok=args.context,
        max_open=args.open_engines,
        spill=args.spill,
        max_s=args.max_seconds,
        layout=Layout(args.layout),
    )
    return Call(options, args.phases, _output(parser, args.out, options), args.commit, args.mix_commits)


def _output(parser: Parser, out: Path | None, options: Options) -> Path:
    is_smoke = options.device == "cpu" or options.shape.name.startswith("smoke")
    if out is None:
        return (options.work if is_smoke else RESULTS) / f"{options.shape.name}.json"
    if is_smoke and out.resolve().is_relative_to(RESULTS.resolve()):
        parser.error(f"argument --out: a smoke run's result does not belong into {RESULTS}; leave --out out")
    return out


def build_parser(description: str | None) -> Parser:
    """All options of run.py."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, a_count = parser.add_argument, _number(1)
    add("--shape", choices=list(SHAPES), required=True)
    add("--seed", type=Path, required=True, help="folder of the trained seed")
    add("--data", type=Path, required=True, help="GSM8K jsonl with the prompts")
    add("--work", type=Path, required=True, help="folder for the store; may be in a tmpfs")
    add("--spill", type=Path, help="another folder for the store's base records")
    add("--out", type=Path, help="result file; one that exists is gone on with, if it measured the same")
    add("--layers", type=a_count, help="keep only the first N layers; the shape's name says so")
    add("--layout", choices=[Layout.CODE_WIDTH.value, Layout.FIXED.value], default=Layout.CODE_WIDTH.value)
    add("--budget", type=_size, help="device memory such as 12GiB; by default the shape's")
    add("--context", type=_number(1, MODEL_CONTEXT_TOK), help=f"context in tokens, up to {MODEL_CONTEXT_TOK}")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--phases", type=_names(PHASES), default=list(PHASES), help=", ".join(PHASES))
    add("--rows", type=_names(ROWS), default=list(ROWS), help=", ".join(ROWS))
    add("--links", type=_links, default=[AS_IS, "25GB"], help="as-is, and bandwidths that copies are paced to")
    add("--repetitions", type=a_count, default=5)
    add("--new-tokens", type=a_count, default=256)
    add("--ttft", type=_lengths, default=[64, 512, 3840], help="prompt lengths in tokens")
    add("--identity", type=_identity, default=(100, 128), help="prompts x new tokens, such as 100x128")
    add("--identity-budget", type=_size, help="device memory of that phase, where more of it saves time")
    add("--accelerate-tokens", type=a_count, default=8)
    add("--open-engines", type=a_count, default=1, help="engines held at once; more rows interleave")
    add("--max-seconds", type=float, default=3600.0, help="begin no run after this time")
    add("--commit", help="of this source, where there is no repository around it")
    add("--mix-commits", action="store_true", help="go on with a result file of another commit")
    return parser


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        if not text.isascii() or not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"give a whole number {allowed}, not '{text}'")
        return int(text)

    return number


def _names(known: Sequence[str] | dict[str, object]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"'{wrong[0]}' is unknown; there are {', '.join(known)}")
        return text.split(",")

    return names


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _links(text: str) -> list[str]:
    for name in text.split(","):
        if name != AS_IS and _size(name) == 0:
            raise argparse.ArgumentTypeError(f"a link carries more than {name}; write it like 25GB")
    return text.split(",")


def _lengths(text: str) -> list[int]:
    return [_number(1)(length) for length in text.split(",")]


def _identity(text: str) -> tuple[int, int]:
    prompts, _, tokens = text.partition("x")
    try:
        return _number(1)(prompts), _number(1)(tokens)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"write prompts x new tokens like 100x128, not '{text}'") from error
