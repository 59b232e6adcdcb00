"""The recent passes of an engine and who has slots, kept for people who look at them: bounded, and cheap to add to.

The engine's thread adds; any other thread reads. The lock is held for an append or a copy of references, so neither
waits for work of the other. Experts are looked at no more often than `EXPERTS_EVERY_S`: two lists are copied then, and
what is made of them is the reader's time.

Nothing here is of a text: no token, no prompt, no request.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from moespeq.decode.link_meter import Span
from moespeq.decode.spectator import PassSeen
from moespeq.types import StepReport

__all__ = ["EXPERTS_EVERY_S", "ExpertsSeen", "Glimpse", "PassKept", "PassSpans", "RoundHistory"]

EXPERTS_EVERY_S = 0.25
_MOST_PASSES = 480
_MOST_SPANS = 16  # passes: each may hold a span for every record it moved


@dataclass(frozen=True, slots=True)
class PassKept:
    """A pass as measured; `number` counts from 1, times are on the engine's clock."""

    number: int
    begin_s: float
    end_s: float
    is_prefill: bool
    report: StepReport
    wasted_bytes: int


@dataclass(frozen=True, slots=True)
class PassSpans:
    """When copies were on the link in a pass, and when it waited for them: disjoint spans, in order."""

    number: int
    begin_s: float
    end_s: float
    copies: Sequence[Span]
    waits: Sequence[Span]


@dataclass(frozen=True, slots=True)
class ExpertsSeen:
    """Who had slots after pass `number`, and for every record a number in the order of its recent use."""

    number: int
    resident: Sequence[int]
    use: Sequence[float]
    num_experts: int


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What a reader gets, oldest first.

    totals: sums since the start, of counts and of bytes by cause; experts of prefills are counted beside those of
    rounds, since a prompt asks for nearly all of them.
    """

    passes: Sequence[PassKept]
    spans: Sequence[PassSpans]
    experts: ExpertsSeen | None
    totals: dict[str, int]


class RoundHistory:
    """A Spectator that remembers the last passes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: deque[PassKept] = deque(maxlen=_MOST_PASSES)
        self._spans: deque[PassSpans] = deque(maxlen=_MOST_SPANS)
        self._experts: ExpertsSeen | None = None
        self._experts_due_s = float("-inf")
        self._totals: Counter[str] = Counter()
        self._number = self._wasted_bytes = 0

    def hear_pass(self, seen: PassSeen) -> None:
        """Keep it. On the engine's thread."""
        number = self._number + 1
        kept = PassKept(number, seen.begin_s, seen.end_s, seen.is_prefill, seen.report, self._newly_wasted(seen))
        spans = PassSpans(number, seen.begin_s, seen.end_s, seen.link.busy, seen.link.stalls)
        experts = self._experts
        if seen.end_s >= self._experts_due_s:
            self._experts_due_s = seen.end_s + EXPERTS_EVERY_S
            experts = ExpertsSeen(number, *seen.residency.standing(), seen.residency.cache.num_experts)
        with self._lock:
            self._passes.append(kept)
            self._spans.append(spans)
            self._experts, self._number = experts, number
            self._count(kept)

    def since(self, number: int) -> Glimpse:
        """The passes after `number`, as many as are kept, and how things stand. From any thread."""
        with self._lock:
            wanted = min(max(0, self._number - number), _MOST_PASSES)
            passes = list(islice(reversed(self._passes), wanted))
            spans = list(islice(reversed(self._spans), wanted))
            return Glimpse(passes[::-1], spans[::-1], self._experts, dict(self._totals))

    def _newly_wasted(self, seen: PassSeen) -> int:
        """Bytes since the last pass; an engine that was retuned counts from 0 again."""
        before_bytes, self._wasted_bytes = self._wasted_bytes, seen.residency.cache.wasted_bytes
        return max(0, self._wasted_bytes - before_bytes)

    def _count(self, kept: PassKept) -> None:
        report, totals = kept.report, self._totals
        totals["prefills" if kept.is_prefill else "rounds"] += 1
        totals["committed"] += report.committed
        asked_in = "prefill_" if kept.is_prefill else ""
        totals[f"{asked_in}hits"] += report.hits
        totals[f"{asked_in}late"] += report.late
        totals[f"{asked_in}misses"] += report.misses
        totals["wasted_bytes"] += kept.wasted_bytes
        for cause, num_bytes in report.bytes_by_cause.items():
            totals[f"{cause.name.lower()}_bytes"] += num_bytes
