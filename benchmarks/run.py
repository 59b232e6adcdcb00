"""Measure moespeq and its baselines on one machine, for one published shape.

    python benchmarks/run.py --shape qwen1.5-moe --seed SEED_DIR --data test.jsonl --work WORK_DIR

SEED_DIR is a trained seed (train_seed.py), test.jsonl is GSM8K's test split, WORK_DIR takes the store. Phases run in
order; `--phases` picks some. Prints the floor first, then the table; writes benchmarks/results/SHAPE.json, from which
report.py makes docs/benchmarks.md, or on a CPU WORK_DIR/SHAPE.json: that such a run works is all it says.
"""

from __future__ import annotations

import time

from arguments import Call, build_parser, parse
from moespeq.config import format_bytes
from moespeq.errors import MoespeqError, UsageError
from phases import PHASES
from session import Session
from summary import summarize_result
from tables import floor_lines, ratio_lines, runs_table, ttft_table


def main(arguments: list[str] | None = None) -> None:
    parser = build_parser(__doc__)
    call = parse(parser, arguments)
    try:
        session = _measure(call)
    except MoespeqError as error:
        parser.error(str(error))
    print("\n".join(_printed(session)))
    print(f"written to {call.out}")


def _measure(call: Call) -> Session:
    """Run the phases. Raises MoespeqError where nothing can be measured; a row that fails is a row with an error."""
    session = Session(call.options, call.out, commit=call.commit, may_mix_commits=call.may_mix_commits)
    if "build" not in call.phases and "store" not in session.result:
        raise UsageError(f"{call.out} has no store of {call.options.shape.name} yet; begin with --phases build.")
    for name in call.phases:
        print(f"{name} ...", flush=True)
        begin_s = time.perf_counter()
        PHASES[name](session)
        summarize_result(session.result)
        session.finish_phase(name, time.perf_counter() - begin_s)
    return session


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


if __name__ == "__main__":
    main()
