"""The policies beside each other on one text, and beside Belady's rule, which knows the future.

Belady's figure is a bound in bytes only: it says what had to cross the link, not when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from moespeq.replay.bound import belady_misses
from moespeq.replay.driver import Trace
from moespeq.replay.routing_trace import RoutingTrace
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import Outcome, Setting, replay_setting, routed
from moespeq.residency import Eviction

__all__ = [
    "POLICIES",
    "ByteBounds",
    "PolicyComparison",
    "PolicyOutcome",
    "byte_bounds",
    "compare_policies",
    "policy_name",
]

POLICIES = {
    "ours": Eviction.NEXT_USE,
    "lru": Eviction.LRU,
    "lfu": Eviction.LFU,
    "chunk": Eviction.CHUNK,
}


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """saving_share: of the bytes that Belady's rule saves against no cache, how many the policy saves."""

    name: str
    outcome: Outcome
    saving_share: float


@dataclass(frozen=True, slots=True)
class ByteBounds:
    """Bytes a committed token: what every use would move, and what Belady's rule would."""

    no_cache: float
    belady: float

    def saving_share(self, bytes_per_tok: float) -> float:
        """Of the bytes Belady's rule saves; 1 where it saves none and so does the policy."""
        possible = self.no_cache - self.belady
        return (self.no_cache - bytes_per_tok) / possible if possible else 1.0


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """Policies on the same text, and what no policy can beat."""

    bounds: ByteBounds
    outcomes: Sequence[PolicyOutcome]


def policy_name(eviction: Eviction) -> str:
    """What POLICIES calls it."""
    return next(name for name, known in POLICIES.items() if known is eviction)


def compare_policies(
    trace: RoutingTrace,
    setting: Setting,
    times: ComputeTimes | None = None,
    *,
    progress: Callable[[int, int, str], object] = lambda done, total, name: None,
) -> PolicyComparison:
    """Each policy under `setting`; with prefetch, ours and LRU also without it, which is loading on demand.

    Raises TraceError and takes `times` as replay_setting does. progress: hears how many of how many are done, and which
    is next.
    """
    bounds = byte_bounds(routed(trace, setting, times), setting)
    kinds = [(name, eviction, setting.options.prefetch) for name, eviction in POLICIES.items()]
    if setting.options.prefetch:
        kinds += [(f"{name} without prefetch", POLICIES[name], False) for name in ("ours", "lru")]
    outcomes = []
    for number, (name, eviction, prefetch) in enumerate(kinds):
        progress(number, len(kinds), name)
        options = replace(setting.options, eviction=eviction, prefetch=prefetch)
        outcome = replay_setting(trace, replace(setting, options=options), times)
        outcomes.append(PolicyOutcome(name, outcome, bounds.saving_share(outcome.bytes_per_tok)))
    return PolicyComparison(bounds, outcomes)


def byte_bounds(trace: Trace, setting: Setting) -> ByteBounds:
    """Of the rounds, starting with what the prompt leaves; records count with their mean length."""
    prompt = [(layer, expert) for layer, experts in enumerate(trace.prompt) for expert in experts]
    uses = [(layer, expert) for one in trace.rounds for layer, experts in enumerate(one.true) for expert in experts]
    num_slots = setting.num_slots
    misses = belady_misses([*prompt, *uses], num_slots=num_slots) - belady_misses(prompt, num_slots=num_slots)
    committed = sum(one.committed for one in trace.rounds)
    record_bytes = fmean(setting.record_bytes)
    return ByteBounds(len(uses) * record_bytes / committed, misses * record_bytes / committed)
