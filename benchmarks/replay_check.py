"""Does `trace replay` foretell what other settings take? Every setting is run, and foretold from every other one.

    python benchmarks/replay_check.py STORE --slots 32 --link-bytes-per-s 4e6 [--tokens 96] [--repetitions 5]
        [--processor-time] [--traces FOLDER]

One setting differs from the first in its depth, slots, link or policy; all answer one prompt, greedily, on a CPU with a
paced link. Cores that others use make a run slower than the same run before, so every setting is run several times,
one after the other, and of each round the fastest repetition counts: text and depths are the same in all.
--processor-time leaves other processes out altogether, see processor_time.py.

A row is a recorded trace, a column the setting that it is asked for: how far its tokens per second are from those that
were measured there, in per cent. The diagonal is each trace's own setting. --traces reads what an earlier call left in
FOLDER, or leaves it there. Kind: study; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.decode.planning import plan_of
from moespeq.decode.recording import record
from moespeq.demo.assets import read_questions
from moespeq.replay import RoutingTrace
from moespeq.replay.what_if import (
    TRUSTED_SHARE,
    Outcome,
    error_share,
    recorded_outcome,
    recorded_setting,
    replay_setting,
)
from moespeq.store import Store
from processor_time import Pace, processor_time

ROWS = 17


@dataclass(frozen=True, slots=True)
class Case:
    """One setting: depth, how many times the slots and the link of the first, and what `Engine.retune` takes else."""

    name: str
    k: int
    slots: int = 1
    link: int = 1
    others: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case("k=4", 4),
    Case("k=16", 16),
    Case("k=0", 0),
    Case("k=4, slots x2", 4, slots=2),
    Case("k=4, link x2", 4, link=2),
    Case("k=16, both x2", 16, slots=2, link=2),
    Case("k=4, lru", 4, others=(("eviction", "lru"),)),
    Case("k=4, on demand", 4, others=(("prefetch", False),)),
)


def record_all(arguments: argparse.Namespace) -> list[RoutingTrace]:
    """A trace of each case, its rounds the fastest of all repetitions."""
    prompt = read_questions(arguments.question + 1)[arguments.question].prompt
    sampling = {"max_new_tokens": arguments.tokens, "temperature": 0.0, "ignore_eos": True}
    pace = Pace(arguments.link_bytes_per_s)
    with ExitStack() as opened:
        if arguments.processor_time:
            opened.enter_context(processor_time(pace))
        engines = {
            times: opened.enter_context(open_with(arguments.store, times * arguments.slots))
            for times in {case.slots for case in CASES}
        }

        def tune(case: Case) -> Engine:
            pace.bytes_per_s = arguments.link_bytes_per_s * case.link
            paced = {} if arguments.processor_time else {"link_bytes_per_s": pace.bytes_per_s}
            own = {"k": case.k, "eviction": "auto", "prefetch": True} | dict(case.others)
            engines[case.slots].retune(**own, **paced)
            return engines[case.slots]

        traces = [record(tune(case), prompt, **sampling).trace for case in CASES]
        for _ in range(arguments.repetitions - 1):
            for index, case in enumerate(CASES):
                traces[index] = undisturbed(traces[index], record(tune(case), prompt, **sampling).trace)
    return traces


def open_with(store: Path, num_slots: int) -> Engine:
    """An engine with exactly so many slots."""
    options = LoadOptions(device="cpu", threads=1, rows=ROWS)
    with Store.open(store) as opened:
        _, plan = plan_of(opened, options)
    memory = plan.total_bytes - plan.slots_bytes + num_slots * plan.slot_bytes
    return open_engine(store, options.replaced({"device_memory": memory}))


def undisturbed(left: RoutingTrace, right: RoutingTrace) -> RoutingTrace:
    """Of each round, and of the draft's step, the run that took less."""
    shapes = [[(one.k, one.committed) for one in trace.rounds] for trace in (left, right)]
    assert shapes[0] == shapes[1], "another text"
    rounds = [
        min(pair, key=lambda one: one.draft_s + one.verify_s) for pair in zip(left.rounds, right.rounds, strict=True)
    ]
    step_s = min(left.header.draft_step_s, right.header.draft_step_s)
    return replace(left, header=replace(left.header, draft_step_s=step_s), rounds=rounds)


def foretold(trace: RoutingTrace, other: RoutingTrace) -> Outcome:
    """What `trace` says of the settings of `other`."""
    own, asked = recorded_setting(trace), recorded_setting(other)
    if trace is other:
        return replay_setting(trace, own)
    setting = replace(own, num_slots=asked.num_slots, link=asked.link, options=asked.options)
    return replay_setting(trace, replace(setting, k=max(one.k for one in other.rounds)))


def report(traces: Sequence[RoutingTrace]) -> None:
    """The table, what it amounts to, and JSON."""
    measured = [recorded_outcome(trace) for trace in traces]
    errors = [
        [error_share(was, foretold(trace, other)) for other, was in zip(traces, measured, strict=True)]
        for trace in traces
    ]
    places = range(len(CASES))
    print(f"{'':18}" + "".join(f"{number:7}" for number in places))
    print(f"{'measured tok/s':18}" + "".join(f"{one.tok_per_s:7.1f}" for one in measured))
    print(f"{'of it stall, %':18}" + "".join(f"{100 * one.stall_share:7.0f}" for one in measured))
    for number, (case, row) in enumerate(zip(CASES, errors, strict=True)):
        print(f"{number} {case.name:16}" + "".join(f"{100 * error:+7.1f}" for error in row))
    own = max(abs(errors[number][number]) for number in places)
    others = [abs(errors[row][column]) for row in places for column in places if row != column]
    within = sum(error <= TRUSTED_SHARE for error in others)
    print(
        f"own settings: at most {own:.1%} off; others: {within} of {len(others)} within {TRUSTED_SHARE:.0%}, at most "
        f"{max(others):.1%}"
    )
    cases = [case.name for case in CASES]
    tok_per_s = [one.tok_per_s for one in measured]
    rounded = [[round(error, 4) for error in row] for row in errors]
    print(json.dumps({"kind": "study", "cases": cases, "tok_per_s": tok_per_s, "errors": rounded}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", type=Path, help="a store of nested records")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--link-bytes-per-s", type=float, required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--question", type=int, default=2, help="of the packaged ones")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--traces", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    paths = [] if arguments.traces is None else [arguments.traces / f"{index}.trace" for index in range(len(CASES))]
    if paths and paths[0].exists():
        traces = [RoutingTrace.read(path) for path in paths]
    else:
        traces = record_all(arguments)
        for path, trace in zip(paths, traces, strict=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.write(path)
    report(traces)


if __name__ == "__main__":
    main()
