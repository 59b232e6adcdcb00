"""What to fetch next, as pure functions of (ELB, cache, room): nothing is stored here, nothing is moved.

While the draft runs, the most valuable predicted record first: expected uses per byte, then the layer that
asks first. Three phases: *prime*, the first steps, fills free slots and evicts nothing, because the next
steps will name most of what is resident; *prefetch* takes idle records' slots; *saturate*, after the last
step, goes on with all that is predicted and missing. While the target runs, *stage* brings the layers ahead
of the compute front in the order they will ask. Demand, the true routes of the layer that asks now, goes
before all of this and is no plan: `Residency.acquire` submits it directly.

An intent has no slot: whether one can be had is eviction's decision, made when the link is free. A guess
takes free slots and idle records only. Evicting a record with a predicted use for another one would move two
records in place of one, so the rule's second half (the farthest next use) is left to demand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container
from dataclasses import dataclass

from moespeq.residency.lookahead import ExpertLookahead
from moespeq.types import Cause, ExpertKey

__all__ = ["Intent", "draft_phase", "plan_prefetch", "plan_stage"]

# On recorded routes at k = 32, priming for 0.3 of the draft moves a tenth fewer bytes in the same time.
_PRIME_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Intent:
    """A record worth moving, and why."""

    key: ExpertKey
    cause: Cause


def draft_phase(*, steps_done: int, num_steps: int) -> Cause:
    """The phase after `steps_done` of `num_steps` draft steps; unknown lengths (0) count as drafted."""
    if steps_done >= num_steps:
        return Cause.SATURATE
    return Cause.PRIME if steps_done < _PRIME_SHARE * num_steps else Cause.PREFETCH


def plan_prefetch(
    lookahead: ExpertLookahead,
    cached: Container[ExpertKey],
    *,
    cause: Cause,
    num_bytes: Callable[[ExpertKey], int],
    limit: int,
) -> list[Intent]:
    """The `limit` predicted, missing records with the most expected uses per byte; ties by layer, then id."""
    missing = ((-uses / num_bytes(key), key) for key, uses in lookahead.ahead() if key not in cached)
    return [Intent(key, cause) for _, key in heapq.nsmallest(limit, missing)]


def plan_stage(
    lookahead: ExpertLookahead,
    cached: Container[ExpertKey],
    *,
    frequency: Callable[[ExpertKey], float],
    limit: int,
) -> list[Intent]:
    """The next `limit` missing records in layer order; inside a layer the most expected, then most frequent,
    then id.
    """
    intents: list[Intent] = []
    for layer in range(lookahead.front, lookahead.num_layers):
        missing = [
            (-uses, -frequency(key), key) for key, uses in lookahead.expected_uses(layer).items() if key not in cached
        ]
        intents.extend(Intent(key, Cause.STAGE) for _, _, key in heapq.nsmallest(limit - len(intents), missing))
        if len(intents) == limit:
            break
    return intents
