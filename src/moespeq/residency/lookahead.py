"""The expert lookahead buffer (ELB): what the draft says the running pass will use, by layer.

Owns the predictions of one round; knows neither slots nor bytes. A verify visits its layers once, in order,
and a record belongs to one layer, so a record has at most one use left in a pass: at its own layer, until
that layer has asked. That is why `has_use` is a lookup and the next use of a record is its layer's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moespeq.types import ExpertKey

__all__ = ["ExpertLookahead"]


class ExpertLookahead:
    """ELB[i][l] = (expert, confidence) of draft step i at layer l, summed over steps into expected uses."""

    def __init__(self, num_layers: int) -> None:
        self._expected: list[dict[ExpertKey, float]] = [{} for _ in range(num_layers)]
        self._front = 0
        self._num_steps = 0

    @property
    def num_layers(self) -> int:
        """Number of MoE layers a pass visits."""
        return len(self._expected)

    @property
    def front(self) -> int:
        """The first layer that has not asked for its experts in this pass."""
        return self._front

    @property
    def num_steps(self) -> int:
        """How many draft steps of this round have predicted something."""
        return self._num_steps

    def add(self, step: int, layer: int, predictions: Sequence[tuple[int, float]]) -> None:
        """Draft step `step` used these (expert, confidence) at `layer`; ignored behind the front."""
        self._num_steps = max(self._num_steps, step + 1)
        if layer < self._front:
            return
        expected = self._expected[layer]
        for expert, confidence in predictions:
            key = ExpertKey(layer, expert)
            expected[key] = expected.get(key, 0.0) + confidence

    def expect_all(self, num_experts: int) -> None:
        """Every expert of every layer will be used: the lookahead of a prefill with many rows."""
        for layer in range(self._front, self.num_layers):
            self._expected[layer] = {ExpertKey(layer, expert): 1.0 for expert in range(num_experts)}

    def has_use(self, key: ExpertKey) -> bool:
        """Whether the running pass is still expected to use this record."""
        return key in self._expected[key.layer]

    def expected_uses(self, layer: int) -> Mapping[ExpertKey, float]:
        """Record -> expected uses still ahead at `layer`; empty once the layer has asked. Read only."""
        return self._expected[layer]

    def ahead(self) -> Iterator[tuple[ExpertKey, float]]:
        """(record, expected uses) of every layer from the front on, in the order verify visits them."""
        for layer in range(self._front, self.num_layers):
            yield from self._expected[layer].items()

    def drop(self, key: ExpertKey) -> None:
        """Expect this record no longer (its fetch failed): only its layer asking brings it in."""
        self._expected[key.layer].pop(key, None)

    def retire(self, layer: int) -> list[ExpertKey]:
        """`layer` asks now: the front moves past it. Returns the records that lost their predicted use."""
        assert layer >= self._front, f"layer {layer} asked twice or out of order, the front is {self._front}"
        lost: list[ExpertKey] = []
        for passed in range(self._front, layer + 1):
            lost.extend(self._expected[passed])
            self._expected[passed] = {}
        self._front = layer + 1
        return lost

    def clear(self) -> list[ExpertKey]:
        """Forget the round, front back to 0. Returns the records that lost their predicted use."""
        lost = self.retire(self.num_layers - 1) if self._front < self.num_layers else []
        self._front = 0
        self._num_steps = 0
        return lost
