"""Does the policy reach what it should? Recorded routes of a seed, replayed with the bytes and times of its full shape.

    python benchmarks/replay_targets.py --shape qwen1.5-moe TRACE... [--depths 0,8,32,64] [--slot-share 0.25]
        [--link-bytes-per-s 55e9] [--draft-step-ms 1.2] [--verify-layer-ms 0.4] [--record-bits 7.7] [--policies]

A seed has the layers, experts and routes of the published model; only bytes and seconds are scaled: records by the
factors of shapes.py, compute by the options. Half of a verify layer passes before its routes are known. Traces are made
by `moespeq trace record SEED`; several of one shape are pooled by their tokens.

ready: hits and late ones, of the distinct experts that layers ask for; named: how many of them the round's draft names,
where it drafts; saved: of the bytes that Belady's rule saves against no cache; wasted: of the bytes fetched. Kind:
study; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from moespeq.replay import LinkModel, RoutingTrace
from moespeq.replay.policies import POLICIES, compare_policies
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import Setting, routed
from moespeq.residency import ResidencyOptions
from shapes import SHAPES

BEGUN = 3  # copies that a GPU's link begins at once
PLAIN_BITS = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy at one depth, over all traces."""

    policy: str
    k: int
    committed_per_round: float
    tok_per_s: float
    mb_per_tok: float
    ready: float
    named: float
    saved: float
    wasted: float
    stall: float


def measure(trace: RoutingTrace, k: int, arguments: argparse.Namespace) -> list[Figures]:
    """Every policy on one trace, ours first."""
    setting, times = scaled_setting(trace, k, arguments)
    rounds = routed(trace, setting, times).rounds
    named = [
        len(set(experts) & {expert for step in one.draft for expert in step[layer]}) / len(experts)
        for one in rounds
        if one.draft
        for layer, experts in enumerate(one.true)
    ]
    committed_per_round = fmean(one.committed for one in rounds)
    return [
        Figures(
            policy=one.name,
            k=k,
            committed_per_round=committed_per_round,
            tok_per_s=one.outcome.tok_per_s,
            mb_per_tok=one.outcome.bytes_per_tok / 1e6,
            ready=one.outcome.hit_share + one.outcome.late_share,
            named=fmean(named) if named else 0.0,
            saved=one.saving_share,
            wasted=one.outcome.wasted_share or 0.0,
            stall=one.outcome.stall_share,
        )
        for one in compare_policies(trace, setting, times).outcomes
    ]


def scaled_setting(trace: RoutingTrace, k: int, arguments: argparse.Namespace) -> tuple[Setting, ComputeTimes]:
    """The trace as its full shape on the link and the device of the options."""
    header, factors = trace.header, SHAPES[arguments.shape].factors
    weights = header.plain_record_bytes * factors.hidden * factors.inner * 8 // PLAIN_BITS
    record_bytes = int(weights * arguments.record_bits / 8)
    num_slots = int(arguments.slot_share * header.num_layers * header.num_experts)
    step_s, layer_s = arguments.draft_step_ms / 1e3, arguments.verify_layer_ms / 1e3
    moved = math.ceil(step_s * arguments.link_bytes_per_s / record_bytes)
    setting = Setting(
        k=k,
        num_slots=num_slots,
        record_bytes=[record_bytes] * header.num_layers,
        link=LinkModel(arguments.link_bytes_per_s, depth=BEGUN),
        options=ResidencyOptions(link_depth=max(1, min(moved + BEGUN, num_slots // 10))),
        is_eager=False,
    )
    times = ComputeTimes(step_s, dense_s=layer_s / 2 * header.num_layers, expert_s=0.0)
    distinct = fmean(len(experts) for one in routed(trace, setting, times).rounds for experts in one.true)
    return setting, replace(times, expert_s=layer_s / 2 / distinct)


def pooled(figures: Sequence[Figures], weights: Sequence[int]) -> Figures:
    """The mean of one policy's figures at one depth, weighted by tokens."""
    names = [name for name, value in asdict(figures[0]).items() if isinstance(value, float)]
    means = {
        name: sum(getattr(one, name) * weight for one, weight in zip(figures, weights, strict=True)) / sum(weights)
        for name in names
    }
    return replace(figures[0], **means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--depths", default="0,8,16,32,64")
    parser.add_argument("--slot-share", type=float, default=0.25, help="slots, of all experts")
    parser.add_argument("--link-bytes-per-s", type=float, default=55e9)
    parser.add_argument("--draft-step-ms", type=float, default=1.2)
    parser.add_argument("--verify-layer-ms", type=float, default=0.4)
    parser.add_argument("--record-bits", type=float, default=7.7, help="a weight, on the link")
    parser.add_argument("--policies", action="store_true", help="every policy, not ours alone")
    arguments = parser.parse_args()
    traces = [RoutingTrace.read(path) for path in arguments.traces]
    weights = [len(trace.positions) - 1 for trace in traces]
    results = []
    print(f"{arguments.shape}: {len(traces)} traces of {sum(weights)} tokens")
    print(f"{'':24}  k  committed  tok/s  MB/tok   ready   named  saved  wasted   stall")
    for k in map(int, arguments.depths.split(",")):
        by_trace = [measure(trace, k, arguments) for trace in traces]
        for one in (pooled(figures, weights) for figures in zip(*by_trace, strict=True)):
            if one.policy in POLICIES if arguments.policies else one.policy == "ours":
                results.append(one)
                print(
                    f"{one.policy:24}{one.k:3}{one.committed_per_round:11.2f}{one.tok_per_s:7.1f}{one.mb_per_tok:8.1f}"
                    f"{100 * one.ready:7.2f}%{100 * one.named:7.2f}%{one.saved:7.3f}{100 * one.wasted:7.2f}%"
                    f"{100 * one.stall:7.1f}%"
                )
    print(json.dumps({"kind": "study", "shape": arguments.shape, "results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    main()
