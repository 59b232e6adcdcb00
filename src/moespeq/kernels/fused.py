"""Activations that the kernels fuse: names that model configurations use -> the kernels' own. No triton here."""

from __future__ import annotations

__all__ = ["FUSED_ACTIVATIONS"]

FUSED_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
