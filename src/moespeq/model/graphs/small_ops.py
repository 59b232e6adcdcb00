"""The operators that rewritten layers call: what a compiler makes several launches of, as one each.

Owns the registration with torch. On a CUDA device they are kernels of ours, elsewhere the torch reference.

Shapes: K input columns, M output columns of all weights together; E columns of a row, k chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moespeq.kernels import small_pass

__all__ = ["register"]


def register() -> None:
    """Define linears, rms_norm, add_rms_norm, topk and softmax_topk in torch.ops.moespeq; again changes nothing."""
    if hasattr(torch.ops.moespeq, "linears"):
        return
    _define(
        "linears(Tensor x, Tensor?[] gates, Tensor[] weights, Tensor?[] biases, ScalarType dtype) -> Tensor",
        small_pass.linears,
        _linears_on_cuda,
        lambda x, gates, weights, biases, dtype: x.new_empty(sum(weight.shape[0] for weight in weights), dtype=dtype),
    )
    _define(
        "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
        small_pass.rms_norm,
        _rms_norm_on_cuda,
        lambda x, weight, eps: x.new_empty(x.shape),
    )
    _define(
        "add_rms_norm(Tensor x, Tensor y, Tensor weight, float eps) -> (Tensor, Tensor)",
        small_pass.add_rms_norm,
        _add_rms_norm_on_cuda,
        lambda x, y, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    )
    _define(
        "topk(Tensor scores, int k) -> (Tensor, Tensor)",
        small_pass.topk,
        _topk_on_cuda,
        lambda scores, k: _chosen_like(scores, k, scores.dtype),
    )
    _define(
        "softmax_topk(Tensor logits, int k, bool normalized, ScalarType dtype) -> (Tensor, Tensor)",
        small_pass.softmax_topk,
        _softmax_topk_on_cuda,
        lambda logits, k, normalized, dtype: _chosen_like(logits, k, dtype),
    )


def _define(schema: str, reference: Callable[..., Any], on_cuda: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name, _, signature = schema.partition("(")
    operator = torch.library.custom_op(f"moespeq::{name}", reference, mutates_args=(), schema=f"({signature}")
    operator.register_kernel("cuda", on_cuda)
    operator.register_fake(fake)


def _chosen_like(scores: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape, dtype=dtype), scores.new_empty(shape, dtype=torch.int64)


def _linears_on_cuda(
    x: Tensor,
    gates: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    from moespeq.kernels.linears import linears

    return linears(x, gates, weights, biases, dtype)


def _rms_norm_on_cuda(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from moespeq.kernels.rms_norm import rms_norm

    return rms_norm(x, weight, eps)


def _add_rms_norm_on_cuda(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from moespeq.kernels.rms_norm import add_rms_norm

    return add_rms_norm(x, y, weight, eps)


def _topk_on_cuda(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    from moespeq.kernels.topk import topk

    return topk(scores, k)


def _softmax_topk_on_cuda(logits: Tensor, k: int, normalized: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from moespeq.kernels.topk import softmax_topk

    return softmax_topk(logits, k, normalized, dtype)
