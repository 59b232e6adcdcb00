"""Worlds for a governor to choose depths in: texts that a draft foretells more or less well, and costs of rounds.

A text fixes for every position whether the draft gets it right, so all depths meet the same text; a round commits the
run of positions it gets right and the one behind. Costs are those of a link-bound engine: distinct experts saturate
with rows, (1 - share)^rows of a layer's are left untouched, and what they take is added to the arithmetic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from moespeq.residency import FixedDepth, Governor
from moespeq.types import Cause, StepReport

__all__ = ["FAST_LINK", "H200", "MIDDLING_LINK", "Costs", "Play", "alternating", "even", "play", "uneven", "wrong"]


@dataclass(frozen=True, slots=True)
class Costs:
    """verify_s(k) = pass_s + all_experts_s * (1 - (1 - share)^(k + 1)), times a lognormal noise."""

    draft_step_s: float
    pass_s: float
    all_experts_s: float
    share: float
    noise: float = 0.05

    def draft_s(self, k: int) -> float:
        return self.draft_step_s * (k + 1) if k else 0.0

    def link_s(self, k: int) -> float:
        return self.all_experts_s * (1.0 - (1.0 - self.share) ** (k + 1))

    def verify_s(self, k: int) -> float:
        return self.pass_s + self.link_s(k)


H200 = Costs(draft_step_s=1.4e-3, pass_s=6.6e-3, all_experts_s=126.5e-3, share=1 / 15)
"""15 ms for one row, 119 ms for 33: the link is what is waited for."""
FAST_LINK = Costs(draft_step_s=1.4e-3, pass_s=1.5e-3, all_experts_s=4e-3, share=1 / 15)
"""1.8 ms for one row, 5 ms for 33: a step of the draft takes most of a token's time, so drafting never pays."""
MIDDLING_LINK = Costs(draft_step_s=1.4e-3, pass_s=4e-3, all_experts_s=8e-3, share=1 / 15)
"""4.5 ms for one row, 11 ms for 33: drafting pays where most is accepted."""


def even(chance: float, num_tok: int, *, seed: int) -> list[bool]:
    """Every position is foretold with the same chance."""
    draw = random.Random(seed)
    return [draw.random() < chance for _ in range(num_tok)]


def uneven(chance: float, num_tok: int, *, seed: int, spread: float = 1.0, mean_run_tok: int = 12) -> list[bool]:
    """Stretches whose chances vary around a mean, as sampling at temperature 1 makes them (beta, spread its weight)."""
    draw = random.Random(seed)
    text: list[bool] = []
    while len(text) < num_tok:
        here = draw.betavariate(chance / spread * 2, (1.0 - chance) / spread * 2)
        text += [draw.random() < here for _ in range(1 + int(draw.expovariate(1 / mean_run_tok)))]
    return text[:num_tok]


def alternating(easy: float, hard: float, num_tok: int, *, seed: int, period_tok: int = 200) -> list[bool]:
    """Easy and hard text in turns."""
    draw = random.Random(seed)
    return [draw.random() < (hard if at // period_tok % 2 else easy) for at in range(num_tok)]


def wrong(num_tok: int) -> list[bool]:
    """A draft that is never right."""
    return [False] * num_tok


@dataclass(frozen=True, slots=True)
class Play:
    """A text decoded to its end."""

    seconds: float
    depths: Sequence[int]
    reports: Sequence[StepReport]


def play(
    governor: Governor | int,
    text: Sequence[bool],
    costs: Costs,
    *,
    k_max: int = 32,
    seed: int = 1,
    confidences: Sequence[float] = (),
) -> Play:
    """Decode `text`; an int is a fixed depth. confidences: the draft's, of each token of the text, for a watch."""
    chooser = FixedDepth(governor) if isinstance(governor, int) else governor
    draw = random.Random(seed)
    at, depths, reports = 0, [], []
    while at < len(text):
        k = chooser.choose(min(k_max, len(text) - at - 1))
        watch, said = chooser.watch(k) if k and confidences else None, confidences[at : at + k]
        if watch is not None and watch.goes_on is not None:
            k = min(k, 1 + sum(1 for _ in takewhile(watch.goes_on, said[:-1])))
        report = _round(text, at, k, costs, math.exp(draw.gauss(0.0, costs.noise)))
        if watch is not None:
            report = replace(report, confidences=said[:k])
        chooser.observe(report)
        at += report.committed
        depths.append(k)
        reports.append(report)
    return Play(sum(report.draft_s + report.verify_s for report in reports), depths, reports)


def _round(text: Sequence[bool], at: int, k: int, costs: Costs, noise: float) -> StepReport:
    accepted = next((run for run in range(k) if not text[at + run]), k)
    link_s = costs.link_s(k)
    return StepReport(
        k=k,
        accepted=accepted,
        committed=accepted + 1,
        hits=0,
        late=0,
        misses=0,
        draft_s=costs.draft_s(k),
        verify_s=costs.verify_s(k) * noise,
        stall_s=link_s * noise,
        bytes_by_cause={Cause.DEMAND: int(55e9 * link_s)},
        link_busy_s=link_s,
    )
