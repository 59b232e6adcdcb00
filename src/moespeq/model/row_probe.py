"""Whether this machine multiplies a row alike wherever it stands in a pass: what exactness rests on, checked at load.

Some CPU kernels (AVX-512 without bf16, on several threads) split the rows of a product between threads and round each
part differently. Then a row's bits would depend on its place, and a text on k. One thread has no such seams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["rows_agree"]


def rows_agree(model: nn.Module, shapes: Sequence[tuple[int, int]], *, rows: int, row_tile: int) -> bool:
    """Multiply equal rows by one weight of every shape of the model, and by expert matrices of `shapes` [out, in]."""
    linears = {module.weight.shape: module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    experts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    with torch.inference_mode():
        return _all_agree(linears.values(), rows, generator) and _all_agree(experts, row_tile, generator)


def _all_agree(weights: Iterable[torch.Tensor], rows: int, generator: torch.Generator) -> bool:
    return all(_agree(weight, rows, generator) for weight in weights)


def _agree(weight: torch.Tensor, rows: int, generator: torch.Generator) -> bool:
    row = torch.randn(1, weight.shape[1], generator=generator).to(weight.dtype)
    products = F.linear(row.expand(rows, -1).contiguous(), weight)  # [R, out]
    return bool((products == products[:1]).all())
