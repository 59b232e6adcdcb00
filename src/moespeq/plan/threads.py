"""How many threads multiply on a CPU."""

from __future__ import annotations

from moespeq.types import ModelShape

__all__ = ["plan_threads"]

_LEAST_WEIGHTS = 1 << 20  # of one expert: below, waking a thread costs more than its share of a product


def plan_threads(shape: ModelShape, wanted: int | None, num_cores: int, reasons: dict[str, str]) -> int:
    """`wanted`, or by default the physical cores, and one where the products are too small to share."""
    if wanted is not None:
        return wanted
    if shape.weights_per_expert < _LEAST_WEIGHTS:
        reasons["threads"] = f"1: an expert has {shape.weights_per_expert} weights, too few to share between threads"
        return 1
    reasons["threads"] = f"{num_cores}: one a physical core"
    return num_cores
