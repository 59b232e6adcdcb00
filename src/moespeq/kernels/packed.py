"""Single instructions on packed registers, each with the same function in plain integer arithmetic for the interpreter.

All values are int32: four bytes, two 16-bit halves (pairs of bf16 bits), or a stretch of a bit stream.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.elements import centre_bits

__all__ = [
    "add_halves",
    "centre_pair",
    "count_bits",
    "equal_halves",
    "low_bits",
    "permute_bytes",
    "shift_right",
    "shift_right_modulo",
]

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def permute_bytes(low, high, selector):  # type: ignore[no-untyped-def]
    """Four bytes, chosen by the selector's low four nibbles among the eight of high:low; bit 3 must be clear."""
    if _IS_INTERPRETED:
        wide = high.to(tl.int64) << 32 | low.to(tl.int64) & 0xFFFFFFFF
        result = tl.zeros_like(low)
        for place in tl.static_range(4):
            chosen = (selector >> 4 * place) & 7
            result |= ((wide >> (8 * chosen).to(tl.int64)) & 0xFF).to(tl.int32) << 8 * place
    else:
        result = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.int32, True, 1
        )
    return result


@triton.jit
def count_bits(value):  # type: ignore[no-untyped-def]
    """How many bits are set."""
    if _IS_INTERPRETED:
        pairs = value - ((value >> 1) & 0x55555555)
        nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        result = (((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 0xFF
    else:
        result = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [value], tl.int32, True, 1)
    return result


@triton.jit
def shift_right(low, high, num_bits):  # type: ignore[no-untyped-def]
    """The low 32 bits of (high << 32 | low) >> num_bits, for 0 to 32 bits."""
    if _IS_INTERPRETED:
        wide = high.to(tl.int64) << 32 | low.to(tl.int64) & 0xFFFFFFFF
        result = (wide >> num_bits.to(tl.int64)).to(tl.int32)
    else:
        result = tl.inline_asm_elementwise(
            "shf.r.clamp.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, num_bits], tl.int32, True, 1
        )
    return result


@triton.jit
def shift_right_modulo(low, high, num_bits):  # type: ignore[no-untyped-def]
    """The same for num_bits % 32."""
    if _IS_INTERPRETED:
        result = shift_right(low, high, num_bits & 31)
    else:
        result = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, num_bits], tl.int32, True, 1
        )
    return result


@triton.jit
def low_bits(value, num_bits):  # type: ignore[no-untyped-def]
    """The value's low num_bits % 32 bits."""
    if _IS_INTERPRETED:
        result = value & ((1 << (num_bits & 31)) - 1)
    else:
        result = tl.inline_asm_elementwise("szext.wrap.u32 $0, $1, $2;", "=r,r,r", [value, num_bits], tl.int32, True, 1)
    return result


@triton.jit
def add_halves(first, second):  # type: ignore[no-untyped-def]
    """Both halves' sums modulo 2^16."""
    if _IS_INTERPRETED:
        result = (first + second) & 0xFFFF | ((first & -65536) + (second & -65536)) & -65536
    else:
        result = tl.inline_asm_elementwise("add.s16x2 $0, $1, $2;", "=r,r,r", [first, second], tl.int32, True, 1)
    return result


@triton.jit
def equal_halves(first, second):  # type: ignore[no-untyped-def]
    """All ones in each half where the arguments, as bf16 numbers, are equal; not for NaN or zeros of two signs."""
    if _IS_INTERPRETED:
        other = first ^ second
        result = tl.where(other & 0xFFFF == 0, 0xFFFF, 0) | tl.where(other & -65536 == 0, -65536, 0)
    else:
        result = tl.inline_asm_elementwise(
            "set.eq.u32.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], tl.int32, True, 1
        )
    return result


@triton.jit
def centre_pair(codes, zeros, scales):  # type: ignore[no-untyped-def]
    """bf16((code - zero) * scale) in each half; codes and zeros as the bf16 numbers 128 + code: 0x4300 | code."""
    if _IS_INTERPRETED:
        first = centre_bits((codes & 0xFF) - (zeros & 0xFF), scales & 0xFFFF)
        second = centre_bits(((codes >> 16) & 0xFF) - (zeros & 0xFF), scales & 0xFFFF)
        result = first | second << 16
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 step; sub.rn.bf16x2 step, $1, $2; mul.rn.bf16x2 $0, step, $3; }",
            "=r,r,r,r",
            [codes, zeros, scales],
            tl.int32,
            True,
            1,
        )
    return result
