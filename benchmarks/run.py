"""Measure moespeq and its baselines on one machine, for one published shape.

    python benchmarks/run.py --shape qwen1.5-moe --seed SEED_DIR --data test.jsonl --work WORK_DIR

SEED_DIR is a trained seed (train_seed.py), test.jsonl is GSM8K's test split, WORK_DIR takes the store. Phases run in
order: build, link, rows, ttft, identity, activity, accelerate; `--phases` picks some. Prints the floor first, then the
table; writes benchmarks/results/SHAPE.json, from which report.py makes docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from moespeq.config import format_bytes, parse_bytes
from phases import PHASES
from rows import AS_IS, ROWS
from session import Options, Session
from shapes import SHAPES
from summary import summarize_result
from tables import floor_lines, ratio_lines, runs_table, ttft_table

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    options = _options(args)
    out = args.out or RESULTS / f"{options.shape.name}.json"
    session = Session(options, out, commit=args.commit)
    for name in args.phases:
        print(f"{name} ...", flush=True)
        begin_s = time.perf_counter()
        PHASES[name](session)
        summarize_result(session.result)
        session.finish_phase(name, time.perf_counter() - begin_s)
    print("\n".join(_printed(session)))
    print(f"written to {out}")


def _printed(session: Session) -> list[str]:
    result = session.result
    lines = [
        f"{result['shape']} on {result['device']['name']}, {format_bytes(result['budget_bytes'])} of device memory, "
        f"commit {result['commit']}"
    ]
    if "summary" in result:
        lines += floor_lines(result) + runs_table(result) + ttft_table(result)
    if "identity_check" in result:
        check = result["identity_check"]
        lines.append(f"identity: {check['prompts']} prompts, different: {check['different_prompts'] or 'none'}")
    lines += ratio_lines(result)
    return lines


def _options(args: argparse.Namespace) -> Options:
    shape = SHAPES[args.shape].cut_to(args.layers)
    links = args.links.split(",")
    if AS_IS not in links:
        links.insert(0, AS_IS)
    prompts, _, tokens = args.identity.partition("x")
    return Options(
        shape=shape,
        seed=args.seed,
        data=args.data,
        work=args.work,
        device=args.device,
        budget_bytes=parse_bytes(args.budget) if args.budget else shape.budget_bytes,
        rows=args.rows.split(","),
        links=links,
        repetitions=args.repetitions,
        new_tok=args.new_tokens,
        ttft_tok=[int(length) for length in args.ttft.split(",")],
        identity=(int(prompts), int(tokens)),
        accelerate_tok=args.accelerate_tokens,
        context_tok=args.context,
        max_open=args.open_engines,
        spill=args.spill,
        max_s=args.max_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--seed", type=Path, required=True, help="folder of the trained seed")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K jsonl with the prompts")
    parser.add_argument("--work", type=Path, required=True, help="folder for the store; may be in a tmpfs")
    parser.add_argument("--spill", type=Path, help="another folder for the store's base records")
    parser.add_argument("--out", type=Path, help="result file; one that exists is gone on with")
    parser.add_argument("--layers", type=int, help="keep only the first N layers; the shape's name says so")
    parser.add_argument("--budget", help="device memory such as 12GiB; by default the shape's")
    parser.add_argument("--context", type=int, help="context of the engines in tokens, up to 16384")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phases", type=lambda text: text.split(","), default=list(PHASES))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--links", default=f"{AS_IS},25GB", help="as-is, and bandwidths that copies are paced to")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--ttft", default="64,512,3840", help="prompt lengths in tokens")
    parser.add_argument("--identity", default="100x128", help="prompts x new tokens")
    parser.add_argument("--accelerate-tokens", type=int, default=8)
    parser.add_argument("--open-engines", type=int, default=1, help="engines held at once; more rows interleave")
    parser.add_argument("--max-seconds", type=float, default=3600.0, help="begin no run after this time")
    parser.add_argument("--commit", help="of this source, where there is no repository around it")
    return parser


if __name__ == "__main__":
    main()
