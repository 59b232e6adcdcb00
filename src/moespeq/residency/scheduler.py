"""What to fetch next of what is predicted and missing. Owns the order only: room is eviction's decision, made when the
link is free, and nothing is moved here.

The order is that of deadlines: the layer that asks first; inside a layer the most expected uses, then the most
frequent, then by id. A record holds its slot from its fetch to its layer, so what is fetched for a far layer costs the
cache a slot for that long; what is fetched for the next one comes back at once.

Four causes. *Prime*, the first steps of a draft, fills free slots and evicts nothing, because the next steps will name
most of what is resident. *Prefetch* takes idle records' slots. It begins as late as it can: so many steps before the
draft's end as the drafts before needed until the last idle slot was filled, a few more after a draft that did not get
there. *Saturate*, after the last step, goes on with all that is predicted and missing, and *stage* while the target
runs. Demand, the true routes of the layer that asks now, goes before all of this and is no plan: `Residency` submits it
directly.

A guess takes free slots and idle records only. Evicting a record with a predicted use for another one would move two
records in place of one, so the rule's second half (the farthest next use) is left to demand.

Nothing is planned before there is room for it, and nothing twice: of a layer whose records are all on their way, only
what later steps name is looked at.
"""

from __future__ import annotations

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.slots import SlotCache
from moespeq.types import Cause

__all__ = ["DraftLead", "Scheduler"]

_LEAD_GROWTH = 1.5


class DraftLead:
    """How many draft steps before the end prefetch begins: learned, so that the last idle slot is filled just in time.

    Begun earlier, it evicts what the steps to come name; later, and the link has rested while it could have worked.
    """

    def __init__(self) -> None:
        self.steps: float = float("inf")

    def learn(self, *, num_steps: int, is_full: bool, done_at: int | None) -> None:
        """A draft of so many steps is over. is_full: no slot is idle any more; done_at: the step after which the link
        had filled them all, None: it had not.
        """
        begun = min(self.steps, num_steps)
        if done_at is not None:
            self.steps = max(1.0, begun - (num_steps - done_at) + 1)
        elif not is_full:
            self.steps = max(self.steps, _LEAD_GROWTH * begun + 1)


class Scheduler:
    """Hands out records worth moving, one by one, for the caller to find room."""

    def __init__(self, cache: SlotCache, lookahead: ExpertLookahead, frequency: UseFrequency) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._frequency = frequency
        self._is_draft = False
        self._num_draft_steps = 0
        self._lead = DraftLead()
        self._is_full = False  # the draft has found no idle slot
        self._done_at: int | None = None  # the draft step after which all of them were filled
        self._staged: list[int] = []  # records of one layer, the next one last
        self._next_layer = 0  # the first layer whose stage order was not made
        self._num_planned = 0  # steps of which something was planned
        self._planned = [0] * lookahead.num_layers  # steps whose records of a layer are held or staged

    def begin(self, *, is_draft: bool, num_draft_steps: int) -> None:
        """A pass starts. `num_draft_steps` sets the phases; unknown lengths (0) count as drafted."""
        self._is_draft = is_draft
        self._num_draft_steps = num_draft_steps
        self._is_full, self._done_at = False, None

    @property
    def cause(self) -> Cause:
        """What a speculative fetch is for, right now."""
        if not self._is_draft or self._lookahead.front > 0:
            return Cause.STAGE
        left = self._num_draft_steps - self._lookahead.num_steps
        if left <= 0:
            return Cause.SATURATE
        return Cause.PRIME if left > self._lead.steps else Cause.PREFETCH

    def note_full(self) -> None:
        """No slot is idle, so no guess goes out until one is."""
        self._is_full = True
        if self._done_at is None and not self._cache.submitted:
            self._done_at = self._lookahead.num_steps

    def end_draft(self) -> None:
        """The first layer asks: what the draft found room for says when the next one should begin."""
        if self._is_draft and self._num_draft_steps:
            self._lead.learn(num_steps=self._num_draft_steps, is_full=self._is_full, done_at=self._done_at)

    def reopen(self, layer: int) -> None:
        """What is missing of `layer` is not what was planned: more is expected, or a fetch came to nothing, or a record
        that is expected was evicted.
        """
        self._planned[layer] = 0
        if layer < self._next_layer:
            self._restart(layer)

    def clear(self) -> None:
        """The pass is over: nothing is worth moving until the next one."""
        self._staged = []
        self._next_layer = self._num_planned = 0
        self._planned = [0] * self._lookahead.num_layers

    def next(self) -> int | None:
        """The next record worth moving, to be submitted before anything else happens; it is not handed out again."""
        return None if self.peek() is None else self._staged.pop()

    def peek(self) -> int | None:
        """What `next` would hand out."""
        if self._num_planned < self._lookahead.num_named:
            self._num_planned = self._lookahead.num_named
            self._restart(0)
        while not self._staged or self._next_layer <= self._lookahead.front:
            layer = max(self._next_layer, self._lookahead.front)
            if layer == self._lookahead.num_layers:
                return None
            self._staged = self._stage_order(layer)
            self._next_layer = layer + 1
        return self._staged[-1]

    def _restart(self, layer: int) -> None:
        """Plan from `layer` on; what is staged goes back."""
        if self._staged:
            self._planned[self._next_layer - 1] = 0
            self._staged = []
        self._next_layer = layer

    def _stage_order(self, layer: int) -> list[int]:
        resident, submitted = self._cache.resident, self._cache.submitted
        named = self._lookahead.named_since(self._planned[layer], layer)
        missing = [record for record in named if record not in resident and record not in submitted]
        self._planned[layer] = self._num_planned
        if len(missing) > 1:  # the first key is sorted by last
            missing.sort(reverse=True)
            missing.sort(key=self._frequency.score.__getitem__)
            missing.sort(key=self._lookahead.expected_uses(layer).__getitem__)
        return missing
