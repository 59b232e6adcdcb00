"""The queue between the scheduler's plan and the link: which speculative fetch is next.

Owns a short plan and remakes it when the lookahead changed or the plan ran out. Planning scans the lookahead,
so it happens only when the link has room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.scheduler import Intent, draft_phase, plan_prefetch, plan_stage
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause, ExpertKey

__all__ = ["Prefetcher"]

_PLAN_LENGTH = 32


class Prefetcher:
    """Hands out planned fetches one by one; the caller decides whether there is room."""

    def __init__(
        self,
        cache: SlotCache,
        lookahead: ExpertLookahead,
        frequency: UseFrequency,
        num_bytes: Callable[[ExpertKey], int],
    ) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._frequency = frequency
        self._num_bytes = num_bytes
        self._plan: deque[Intent] = deque()
        self._is_draft = False
        self._num_draft_steps = 0
        self._is_stale = False

    def begin(self, *, is_draft: bool, num_draft_steps: int) -> None:
        """A pass starts. A draft's plan goes by value until the first layer asks; any other by layer."""
        self._is_draft = is_draft
        self._num_draft_steps = num_draft_steps
        self._is_stale = True

    @property
    def cause(self) -> Cause:
        """What a speculative fetch is for, right now."""
        if not self._is_draft or self._lookahead.front > 0:
            return Cause.STAGE
        return draft_phase(steps_done=self._lookahead.num_steps, num_steps=self._num_draft_steps)

    def invalidate(self) -> None:
        """The lookahead changed."""
        self._is_stale = True

    def clear(self) -> None:
        """The pass is over: plan nothing until the next begin."""
        self._plan.clear()
        self._is_stale = False

    def next(self) -> Intent | None:
        """The next record worth moving; the same one until it is fetched or no longer expected."""
        while self._plan and not self._is_wanted(self._plan[0].key):
            self._plan.popleft()
            self._is_stale = self._is_stale or not self._plan
        if self._is_stale:
            self._plan = deque(self._make_plan())
            self._is_stale = False
        return self._plan[0] if self._plan else None

    def _is_wanted(self, key: ExpertKey) -> bool:
        return key not in self._cache.slot_of and self._lookahead.has_use(key)

    def _make_plan(self) -> list[Intent]:
        cause = self.cause
        if cause is not Cause.STAGE:
            return plan_prefetch(
                self._lookahead,
                self._cache.slot_of,
                cause=cause,
                num_bytes=self._num_bytes,
                limit=_PLAN_LENGTH,
            )
        return plan_stage(self._lookahead, self._cache.slot_of, frequency=self._frequency.score, limit=_PLAN_LENGTH)
