"""The published shapes that seeds are widened to, and the device budgets their benchmarks run in."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Factors:
    """How often a seed's hidden channels, inner expert channels and attention heads are repeated."""

    hidden: int
    inner: int
    heads: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A published shape, or a part of one. num_layers: those of the seed and of the published model alike."""

    name: str
    factors: Factors
    num_layers: int
    budget_bytes: int

    def cut_to(self, num_layers: int | None) -> Shape:
        """The same with fewer layers, named so; the budget shrinks with them, which keeps the share of slots."""
        if num_layers is None or num_layers >= self.num_layers:
            return self
        budget_bytes = self.budget_bytes * num_layers // self.num_layers
        return Shape(f"{self.name}-{num_layers}-layers", self.factors, num_layers, budget_bytes)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen1.5-moe", Factors(16, 44, 8), 24, 12 * GIB),
        Shape("qwen3-30b-half", Factors(16, 48, 16), 24, 12 * GIB),
        Shape("phi-3.5-moe", Factors(32, 80, 16), 32, 32 * GIB),
        Shape("mixtral-8x7b", Factors(32, 64, 16), 32, 40 * GIB),
        Shape("smoke", Factors(1, 1, 1), 8, GIB // 4),  # the packaged demo model as it is: does the script run?
    )
}
