"""Dbrx: its checkpoints stack the rows of all experts, and its own module slices them.

Shapes: T rows, K experts a row, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, Transpose, WeightConverter

from moespeq.model.shims.experts import ShimExperts

__all__ = ["DbrxShim", "StackedExperts", "dbrx_converters"]


class DbrxShim(ShimExperts):
    """The experts of a block; its router stays where it is, outside."""

    def __init__(self, own: Any) -> None:
        """Of transformers' own module."""
        super().__init__(own.num_experts, own.hidden_size, own.ffn_hidden_size, own.mlp.activation_fn, own.mlp.w1)

    def forward(self, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H], routes and weights [T, K] -> [1, T, H]."""
        return super().forward(hidden.flatten(0, 1), routes, weights).view_as(hidden)


class StackedExperts(ConversionOps):  # type: ignore[misc]
    """One tensor holds the rows of all experts one below the other: [E * rows, cols] stands for [E, rows, cols].

    For the map of a checkpoint, which takes experts out of its files: no weight passes through here.
    """

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("experts are not loaded through transformers")

    @property
    def reverse_op(self) -> ConversionOps:
        raise AssertionError("experts are not saved through transformers")


def dbrx_converters() -> list[WeightConverter]:
    """w1 is every expert's gate, v1 its up matrix, w2 [E * I, H] its down matrix, transposed."""
    return [
        WeightConverter(
            source_patterns=["experts.mlp.w1", "experts.mlp.v1"],
            target_patterns="experts.gate_up_proj",
            operations=[StackedExperts(), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="experts.mlp.w2",
            target_patterns="experts.down_proj",
            operations=[StackedExperts(), Transpose(1, 2)],
        ),
    ]
