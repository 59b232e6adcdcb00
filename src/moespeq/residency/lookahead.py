"""The expert lookahead buffer (ELB): what the draft says the running pass will use, by layer.

Owns the predictions of one round; knows neither slots nor bytes. A verify visits its layers once, in order, and a
record belongs to one layer, so a record has at most one use left in a pass: at its own layer, until that layer has
asked. That is why `has_use` is a lookup and the next use of a record is its layer's number. A route counts in full:
verify computes all k + 1 rows whatever is accepted afterwards.

A step is kept as it comes; a layer is summed up when somebody asks about it, over all steps since the last time. So a
step that nobody acts upon costs nothing, and the work goes by layers, not by guesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

__all__ = ["ExpertLookahead"]


class ExpertLookahead:
    """ELB[i][l] = experts of draft step i at layer l, summed over steps into expected uses."""

    def __init__(self, num_layers: int, num_experts: int, *, window_tok: int | None = None) -> None:
        """window_tok: steps that count, the first ones of a round; None: all."""
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.front = 0
        """The first layer that has not asked for its experts in this pass."""
        self.num_steps = 0
        """How many draft steps of this round are done, those behind the window too."""
        self._window_tok = window_tok
        self._steps: list[Sequence[Sequence[int]]] = []
        self._num_summed = [0] * num_layers
        self._uses: list[Counter[int]] = [Counter() for _ in range(num_layers)]

    @property
    def num_named(self) -> int:
        """How many steps have named experts: those inside the window."""
        return len(self._steps)

    def add(self, routes: Sequence[Sequence[int]]) -> None:
        """A draft step routed to the experts `routes[layer]`, to be kept as they are until the round is over."""
        assert len(routes) == self.num_layers, f"{len(routes)} layers of routes, the model has {self.num_layers}"
        self.num_steps += 1
        if self._window_tok is None or self.num_steps <= self._window_tok:
            self._steps.append(routes)

    def expect(self, layer: int, routes: Sequence[Sequence[int]]) -> None:
        """Rows of a prefill route to the experts `routes[row]` at `layer`, which has not asked yet."""
        assert layer >= self.front, f"layer {layer} has asked, the front is {self.front}"
        self._count(layer, routes)

    def expect_all(self) -> None:
        """Every expert of every layer will be used: the lookahead of a prefill with many rows."""
        for layer in range(self.front, self.num_layers):
            first = layer * self.num_experts
            self._uses[layer] = Counter(range(first, first + self.num_experts))

    def has_use(self, record: int) -> bool:
        """Whether the running pass is still expected to use this record."""
        layer = record // self.num_experts
        if self._num_summed[layer] < len(self._steps):
            self._sum_up(layer)
        return record in self._uses[layer]

    def expected_uses(self, layer: int) -> Mapping[int, int]:
        """Record -> expected uses still ahead at `layer`; empty once the layer has asked. Read only."""
        if self._num_summed[layer] < len(self._steps):
            self._sum_up(layer)
        return self._uses[layer]

    def named_since(self, step: int, layer: int) -> Iterable[int]:
        """The records of `layer` that steps from `step` on named, each once, in order."""
        if step == 0 or layer < self.front:
            return self.expected_uses(layer)
        experts = chain.from_iterable([routes[layer] for routes in self._steps[step:]])
        return dict.fromkeys(map((layer * self.num_experts).__add__, experts))

    def drop(self, record: int) -> None:
        """Expect this record no longer (its fetch failed): only its layer asking brings it in."""
        if self.has_use(record):
            del self._uses[record // self.num_experts][record]

    def retire(self, layer: int) -> Mapping[int, int]:
        """`layer` asks now: the front moves past it. Returns the records that lost their predicted uses, and those."""
        assert layer >= self.front, f"layer {layer} asked twice or out of order, the front is {self.front}"
        lost: Counter[int] = Counter()
        for passed in range(self.front, layer + 1):
            self.expected_uses(passed)
            lost = lost + self._uses[passed] if lost else self._uses[passed]
            self._uses[passed] = Counter()
        self.front = layer + 1
        return lost

    def clear(self) -> None:
        """Forget the round, front back to 0."""
        for layer in range(self.front, self.num_layers):
            self._uses[layer] = Counter()
        self._steps = []
        self._num_summed = [0] * self.num_layers
        self.front = self.num_steps = 0

    def _sum_up(self, layer: int) -> None:
        """Count what the steps since the last time named at `layer`; nothing where it has asked."""
        if layer >= self.front:
            self._count(layer, [routes[layer] for routes in self._steps[self._num_summed[layer] :]])
        self._num_summed[layer] = len(self._steps)

    def _count(self, layer: int, routes: Iterable[Sequence[int]]) -> None:
        self._uses[layer].update(map((layer * self.num_experts).__add__, chain.from_iterable(routes)))
