"""Activations inside the kernels.

A gated expert computes bf16(act(gate)) * up, an ungated one act(up); gate and up are rounded to bf16 first, as torch's
modules do. What is not here is applied between the kernels, in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "gate_and_multiply"]


@triton.jit
def activate(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """x float32 -> act(x) float32."""
    if kind == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif kind == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi), for tanh from one exponential
        y = x - x / (1.0 + tl.exp(inner))
    elif kind == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(kind == "relu")
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def gate_and_multiply(gate, up, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 sums of both halves -> bf16(bf16(act(bf16(gate))) * bf16(up))."""
    opened = activate(gate.to(tl.bfloat16).to(tl.float32), kind).to(tl.bfloat16)
    return (opened.to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
