"""How many threads multiply on a CPU."""

from __future__ import annotations

from moespeq.config import LoadOptions
from moespeq.errors import UsageError
from moespeq.types import ModelShape

__all__ = ["plan_threads"]

_LEAST_WEIGHTS = 1 << 20  # of one expert: below, waking a thread costs more than its share of a product
_MOST_PER_CORE = 8  # far above any use; beyond, starting the threads themselves fails


def plan_threads(shape: ModelShape, options: LoadOptions, num_cores: int, reasons: dict[str, str]) -> int:
    """Those asked for, or by default the physical cores, and one where nothing large is multiplied here.

    Raises UsageError for more threads than any machine of so many cores has a use for.
    """
    wanted = options.threads
    if wanted is not None:
        most = _MOST_PER_CORE * num_cores
        if wanted > most:
            raise UsageError(f"threads must be at most {most} on {num_cores} physical cores, got {wanted}.")
        return wanted
    if options.device == "cuda":
        reasons["threads"] = "1: the GPU multiplies"
        return 1
    if shape.weights_per_expert < _LEAST_WEIGHTS:
        reasons["threads"] = f"1: an expert has {shape.weights_per_expert} weights, too few to share between threads"
        return 1
    reasons["threads"] = f"{num_cores}: one a physical core"
    return num_cores
