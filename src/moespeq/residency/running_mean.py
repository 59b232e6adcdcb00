"""A mean of recent measurements, where recent counts samples and tokens: what was measured long ago weighs
little against one new sample, so that a depth nobody ran for a while is known again after one round.
"""

from __future__ import annotations

__all__ = ["RunningMean"]

_FADING_PER_TOK = 0.98


class RunningMean:
    """Weights at most `memory` samples, and less as committed tokens go by. The first sample counts whole."""

    __slots__ = ("_fading_per_tok", "_memory", "_weight", "num_samples", "updated_tok", "value")

    def __init__(self, memory: int, *, fading_per_tok: float = _FADING_PER_TOK) -> None:
        self._memory, self._fading_per_tok = memory, fading_per_tok
        self._weight = 0.0
        self.value = 0.0
        self.num_samples = 0
        self.updated_tok = 0

    def weight_at(self, now_tok: int) -> float:
        """How many samples the mean is worth by now."""
        return self._weight * self._fading_per_tok ** (now_tok - self.updated_tok)

    def add(self, sample: float, *, now_tok: int) -> None:
        """Take one measurement in."""
        weight = min(self.weight_at(now_tok), self._memory - 1)
        self.value += (sample - self.value) / (weight + 1.0)
        self._weight = weight + 1.0
        self.num_samples += 1
        self.updated_tok = now_tok

    def restart(self, value: float, *, weight: float, now_tok: int) -> None:
        """Forget what came before: from here on the mean is `value`, worth `weight` samples."""
        self.value, self._weight, self.updated_tok = value, weight, now_tok
