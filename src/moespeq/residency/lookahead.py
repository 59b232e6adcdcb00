"""The expert lookahead buffer (ELB): what the draft says the running pass will use, by layer.

Owns the predictions of one round; knows neither slots nor bytes. A verify visits its layers once, in order, and a
record belongs to one layer, so a record has at most one use left in a pass: at its own layer, until that layer has
asked. That is why `has_use` is a lookup and the next use of a record is its layer's number. A route counts in full:
verify computes all k + 1 rows whatever is accepted afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["ExpertLookahead"]


class ExpertLookahead:
    """ELB[i][l] = experts of draft step i at layer l, summed over steps into expected uses."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.front = 0
        """The first layer that has not asked for its experts in this pass."""
        self.num_steps = 0
        """How many draft steps of this round have predicted something."""
        self._uses: list[dict[int, int]] = [{} for _ in range(num_layers)]

    def add(self, routes: Sequence[Sequence[int]]) -> dict[int, int]:
        """A draft step routed to the experts `routes[layer]`; what lies behind the front is ignored.

        Returns what the step named, record -> its expected uses by now.
        """
        assert len(routes) == self.num_layers, f"{len(routes)} layers of routes, the model has {self.num_layers}"
        self.num_steps += 1
        named: dict[int, int] = {}
        for layer in range(self.front, self.num_layers):
            uses, first = self._uses[layer], layer * self.num_experts
            for expert in routes[layer]:
                record = first + expert
                named[record] = uses[record] = uses.get(record, 0) + 1
        return named

    def expect(self, layer: int, routes: Sequence[Sequence[int]]) -> None:
        """Rows of a prefill route to the experts `routes[row]` at `layer`, which has not asked yet."""
        assert layer >= self.front, f"layer {layer} has asked, the front is {self.front}"
        uses, first = self._uses[layer], layer * self.num_experts
        for experts in routes:
            for expert in experts:
                uses[first + expert] = uses.get(first + expert, 0) + 1

    def expect_all(self) -> None:
        """Every expert of every layer will be used: the lookahead of a prefill with many rows."""
        for layer in range(self.front, self.num_layers):
            first = layer * self.num_experts
            self._uses[layer] = dict.fromkeys(range(first, first + self.num_experts), 1)

    def has_use(self, record: int) -> bool:
        """Whether the running pass is still expected to use this record."""
        return record in self._uses[record // self.num_experts]

    def expected_uses(self, layer: int) -> Mapping[int, int]:
        """Record -> expected uses still ahead at `layer`; empty once the layer has asked. Read only."""
        return self._uses[layer]

    def drop(self, record: int) -> None:
        """Expect this record no longer (its fetch failed): only its layer asking brings it in."""
        self._uses[record // self.num_experts].pop(record, None)

    def retire(self, layer: int) -> Collection[int]:
        """`layer` asks now: the front moves past it. Returns the records that lost their predicted use."""
        assert layer >= self.front, f"layer {layer} asked twice or out of order, the front is {self.front}"
        lost: dict[int, int] = {}
        for passed in range(self.front, layer + 1):
            lost = {**lost, **self._uses[passed]} if lost else self._uses[passed]
            self._uses[passed] = {}
        self.front = layer + 1
        return lost.keys()

    def clear(self) -> None:
        """Forget the round, front back to 0."""
        for layer in range(self.front, self.num_layers):
            self._uses[layer] = {}
        self.front = self.num_steps = 0
