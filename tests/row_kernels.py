"""A matrix product whose rounding certainly depends on the number of its rows, on every CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

__all__ = ["sum_one_row_in_halves"]


def sum_one_row_in_halves(patch: pytest.MonkeyPatch) -> None:
    """Let a bf16 product of one row be summed in two halves, each rounded; products of more rows are as they were.

    This is what AVX-512 kernels do at 1408 -> 2048 and others at other sizes, made visible at every size.
    """
    whole = F.linear

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if rows.shape[:-1].numel() > 1 or rows.dtype is not torch.bfloat16:
            return whole(rows, weight, bias)
        half = rows.shape[-1] // 2
        return whole(rows[..., :half], weight[:, :half], bias) + whole(rows[..., half:], weight[:, half:])

    patch.setattr(F, "linear", linear)
