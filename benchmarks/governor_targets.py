"""Does the adaptive depth reach what it should? Recorded routes of a seed, decoded by the governor on a virtual clock.

    python benchmarks/governor_targets.py --shape qwen1.5-moe --easy TRACE... --sampled TRACE... [--num-tok 1000]
        [--hard-chance 0.4] [--depths 0,1,2,...,32] [--slot-share 0.25] [--link-bytes-per-s 55e9] ...

Easy text is greedy, sampled text has temperature 1: their traces one after the other, cut into texts of --num-tok.
Where rounds happen to begin decides several percent of a fixed depth's time on one text, so depths are compared by all
texts together. The seeds' drafts are right on any text, at temperature 1.6 too, so hard text is the easy one, a token
of it accepted by a draw of --hard-chance; alternating changes between the two every 200 tokens; on wrong nothing is
accepted. Bytes and times are those of replay_targets.py, computing as measured at the deepest of the depths. On demand:
one row, plain records, no base, LRU.

A fixed depth more than a fifth slower than the best shallower one ends the search for the best.

loss: seconds more than the best fixed depth took; against 0: than k = 0 took, over the worst 1,000 tokens; trials: what
the governor counts as lost on them, of the time. Kind: study; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean

from moespeq.replay import RoutingTrace
from moespeq.replay.governed import replay_governed
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import Setting
from moespeq.residency import AmortizingDepth, Eviction, FixedDepth, Governor, GovernorOptions
from moespeq.types import StepReport
from replay_targets import PLAIN_BITS, scaled_setting

BASE_BITS = 4.25
STRETCH_TOK = 200
HOPELESS = 1.2
MOST_LOSS, MOST_AGAINST_PLAIN, MOST_TRIALS = 0.03, 0.02, 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """A text, and of each of its tokens whether what is drafted behind it is accepted."""

    name: str
    trace: RoutingTrace
    verdicts: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Played:
    """A text decoded to its end."""

    reports: Sequence[StepReport]
    trials_lost_s: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(report.draft_s + report.verify_s for report in self.reports)


@dataclass(frozen=True, slots=True)
class Figures:
    """One workload, all its texts. Shares are of time: 0.01 is 1 %."""

    workload: str
    num_tok: int
    tok_per_s: float
    mean_k: float
    best_k: int
    best_tok_per_s: float
    plain_tok_per_s: float
    on_demand_tok_per_s: float
    loss: float
    against_plain: float
    trials: float

    @property
    def is_reached(self) -> bool:
        return self.loss <= MOST_LOSS and self.against_plain <= MOST_AGAINST_PLAIN and self.trials <= MOST_TRIALS


def workloads(easy: RoutingTrace, sampled: RoutingTrace, hard_chance: float, seed: int = 0) -> list[Workload]:
    """Texts of equal length."""
    draw = random.Random(seed)
    foretold = [position.accepted for position in easy.positions]
    hard = [is_accepted and draw.random() < hard_chance for is_accepted in foretold]
    turns = [hard[at] if at // STRETCH_TOK % 2 else foretold[at] for at in range(len(foretold))]
    return [
        Workload("easy", easy, foretold),
        Workload("hard", easy, hard),
        Workload("sampled", sampled, [position.accepted for position in sampled.positions]),
        Workload("alternating", easy, turns),
        Workload("wrong", easy, [False] * len(foretold)),
    ]


def texts_of(paths: Sequence[Path], num_tok: int) -> list[RoutingTrace]:
    """Texts of `num_tok` tokens after their first one, from all traces one after the other; one if they are shorter."""
    traces = [RoutingTrace.read(path) for path in paths]
    positions = list(chain.from_iterable(trace.positions for trace in traces))
    starts = range(0, max(1, len(positions) - num_tok), num_tok)
    return [replace(traces[0], positions=positions[start : start + num_tok + 1]) for start in starts]


def measure(
    texts: Sequence[Workload], setting: Setting, on_demand: Setting, times: ComputeTimes, depths: Sequence[int]
) -> Figures:
    """The adaptive depth, fixed ones and the on-demand baseline on the texts of one workload; depths begin with 0."""

    def play(text: Workload, chooser: Governor, played: Setting = setting) -> Played:
        reports = replay_governed(text.trace, text.verdicts, chooser, played, times, most_k=max(depths))
        return Played(reports, chooser.trials_lost_s if isinstance(chooser, AmortizingDepth) else 0.0)

    adaptive = [play(text, AmortizingDepth(GovernorOptions(k_max=max(depths)))) for text in texts]
    fixed: dict[int, list[Played]] = {}
    for k in depths:
        fixed[k] = [play(text, FixedDepth(k)) for text in texts]
        if _seconds(fixed[k]) > HOPELESS * min(map(_seconds, fixed.values())):
            break
    best_k = min(fixed, key=lambda k: _seconds(fixed[k]))
    reports = [report for one in adaptive for report in one.reports]
    num_tok, seconds = sum(report.committed for report in reports), _seconds(adaptive)
    return Figures(
        workload=texts[0].name,
        num_tok=num_tok,
        tok_per_s=num_tok / seconds,
        mean_k=fmean(report.k for report in reports),
        best_k=best_k,
        best_tok_per_s=num_tok / _seconds(fixed[best_k]),
        plain_tok_per_s=num_tok / _seconds(fixed[0]),
        on_demand_tok_per_s=num_tok / _seconds([play(text, FixedDepth(0), on_demand) for text in texts]),
        loss=seconds / _seconds(fixed[best_k]) - 1.0,
        against_plain=max(_worst_against(*both) for both in zip(adaptive, fixed[0], strict=True)),
        trials=max(max(0.0, one.trials_lost_s) / one.seconds for one in adaptive),
    )


def on_demand_of(setting: Setting, num_records: int, record_bits: float) -> Setting:
    """The same device memory: no base in it, plain records in all of it."""
    factor = PLAIN_BITS / record_bits
    plain_bytes = [int(num_bytes * factor) for num_bytes in setting.record_bytes]
    base_bytes = num_records * plain_bytes[0] * BASE_BITS / PLAIN_BITS
    num_slots = int((setting.num_slots * setting.record_bytes[0] + base_bytes) / plain_bytes[0])
    options = replace(setting.options, prefetch=False, eviction=Eviction.LRU)
    return replace(setting, num_slots=num_slots, record_bytes=plain_bytes, options=options)


def _seconds(texts: Sequence[Played]) -> float:
    return sum(text.seconds for text in texts)


def _worst_against(adaptive: Played, plain: Played, window_tok: int = 1000) -> float:
    """The most time more than plain decoding that any `window_tok` tokens, whole rounds, took; texts may be shorter."""
    ends_s = [0.0, *accumulate(report.verify_s for report in plain.reports)]  # plain rounds commit one token each
    tokens = [0, *accumulate(report.committed for report in adaptive.reports)]
    seconds = [0.0, *accumulate(report.draft_s + report.verify_s for report in adaptive.reports)]
    least_tok = min(window_tok, tokens[-1])
    worst, begin = -1.0, 0
    for end in range(1, len(tokens)):
        while tokens[end] - tokens[begin + 1] >= least_tok:
            begin += 1
        if tokens[end] - tokens[begin] >= least_tok:
            plain_s = ends_s[tokens[end]] - ends_s[tokens[begin]]
            worst = max(worst, (seconds[end] - seconds[begin]) / plain_s - 1.0)
    return worst


def table(results: Sequence[Figures]) -> str:
    lines = ["workload      tok/s  mean k  best k   tok/s  k=0 tok/s  on demand    loss  against 0  trials"]
    lines += [
        f"{one.workload:12}{one.tok_per_s:7.1f}{one.mean_k:8.1f}{one.best_k:8}{one.best_tok_per_s:8.1f}"
        f"{one.plain_tok_per_s:11.1f}{one.on_demand_tok_per_s:11.1f}{100 * one.loss:7.1f}%"
        f"{100 * one.against_plain:10.1f}%{100 * one.trials:7.2f}%{'' if one.is_reached else '  MISSED'}"
        for one in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--easy", nargs="+", type=Path, required=True)
    parser.add_argument("--sampled", nargs="+", type=Path, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--num-tok", type=int, default=1000)
    parser.add_argument("--hard-chance", type=float, default=0.4)
    parser.add_argument("--depths", default="0,1,2,4,8,16,24,32")
    parser.add_argument("--slot-share", type=float, default=0.25, help="slots, of all experts")
    parser.add_argument("--link-bytes-per-s", type=float, default=55e9)
    parser.add_argument("--draft-step-ms", type=float, default=1.2)
    parser.add_argument("--verify-layer-ms", type=float, default=0.4)
    parser.add_argument("--record-bits", type=float, default=7.7, help="a weight, on the link")
    arguments = parser.parse_args()
    depths = [int(k) for k in arguments.depths.split(",")]
    setting, times = scaled_setting(RoutingTrace.read(arguments.easy[0]), max(depths), arguments)
    easy, sampled = (texts_of(paths, arguments.num_tok) for paths in (arguments.easy, arguments.sampled))
    num_records = easy[0].header.num_layers * easy[0].header.num_experts
    on_demand = on_demand_of(setting, num_records, arguments.record_bits)
    rows = [workloads(*pair, arguments.hard_chance, seed) for seed, pair in enumerate(zip(easy, sampled, strict=False))]
    results = [measure(texts, setting, on_demand, times, depths) for texts in zip(*rows, strict=True)]
    print(table(results))
    print(json.dumps({"kind": "study", "shape": arguments.shape, "results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    main()
