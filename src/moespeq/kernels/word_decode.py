"""Eight weights of the fixed layout at once: a word of codes and its residual to four packed pairs of bf16.

Two forms of one function. `decode_word` runs everywhere and reads like the format's rules; on a CUDA device `_ASSEMBLY` does
the same in about nine integer instructions a weight:

- a code in the low bits of 0x4300 is the bf16 128 + code, so bf16(step * scale) is an exact subtraction and one product;
- a byte permutation widens residual bytes with their sign, or puts a nibble above them;
- the nibbles of the window are spread to bytes once, and the running counts of zero codes, four bits each, are the
  permutation's selector that brings each to its place;
- a far weight is scale - (sign << 15 | distance) modulo 2^16, the complement of ~scale + that;
- distance 2047 is a zero: there 2047 stands in for the scale, so that only the sign is left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.elements import centre_bits

__all__ = ["decode_word"]

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# $0-$3 pairs of weights; $4 codes, $5 $6 residual bytes, $7 $8 the nibbles' words, $9 first nibble * 4,
# $10 running counts, $11 the scale's bits twice, $12 the zero code twice above 0x43004300.
_SPREAD = """
        shf.r.wrap.b32 n, $7, $8, $9;
        shl.b32 u, n, 4;
        lop3.b32 u, n, u, 0x07070707, 0xe4;
        and.b32 u, u, 0x87878787;
        shr.u32 v, n, 4;
        lop3.b32 v, v, n, 0x07070707, 0xe4;
        and.b32 v, v, 0x87878787;
        prmt.b32 n, u, v, 0x5140;
        prmt.b32 v, u, v, 0x7362;
        shl.b32 u, $10, 4;
        prmt.b32 n0, n, v, u;
        shr.u32 u, $10, 12;
        prmt.b32 n1, n, v, u;
        and.b32 u, $4, 0x0f0f0f0f;
        shr.u32 v, $4, 4;
        and.b32 v, v, 0x0f0f0f0f;
"""
_PAIR = """
        prmt.b32 c, u, v, 0x{code};
        lop3.b32 c, c, 0x00ff00ff, 0x43004300, 0xea;
        set.eq.u32.bf16x2 k, c, $12;
        sub.rn.bf16x2 c, c, $12;
        mul.rn.bf16x2 c, c, $11;
        prmt.b32 b, {bytes}, 0, 0x{signed};
        add.s16x2 c, c, b;
        prmt.b32 b, {bytes}, {nibbles}, 0x{widened};
        and.b32 n, b, 0x07ff07ff;
        set.eq.u32.bf16x2 n, n, z;
        lop3.b32 n, n, $11, z, 0xac;
        not.b32 n, n;
        add.s16x2 n, n, b;
        lop3.b32 ${pair}, k, n, c, 0x3a;
"""
_PAIRS = (
    {"pair": 0, "code": "4400", "bytes": "$5", "nibbles": "n0", "signed": "9180", "widened": "5140"},
    {"pair": 1, "code": "5511", "bytes": "$5", "nibbles": "n0", "signed": "b3a2", "widened": "7362"},
    {"pair": 2, "code": "6622", "bytes": "$6", "nibbles": "n1", "signed": "9180", "widened": "5140"},
    {"pair": 3, "code": "7733", "bytes": "$6", "nibbles": "n1", "signed": "b3a2", "widened": "7362"},
)
_ASSEMBLY = tl.constexpr(
    "{ .reg .b32 n, u, v, c, k, b, z, n0, n1; mov.b32 z, 0x07ff07ff;"
    + _SPREAD
    + "".join(_PAIR.format(**pair) for pair in _PAIRS)
    + "}"
)
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")


@triton.jit
def decode_word(word, low_bytes, high_bytes, nibbles, next_nibbles, first_nibble, counts, scale, zero):  # type: ignore[no-untyped-def]
    """Four int32 tensors, two bf16 each in element order. All arguments are int32 of one shape.

    nibbles, next_nibbles: the words of the nibble plane that hold nibble number `first_nibble` and what follows; counts:
    zero codes up to and with each of the eight codes, four bits each; scale: its bits; zero: the zero code.
    """
    if _IS_INTERPRETED:
        window = (next_nibbles.to(tl.int64) << 32 | nibbles.to(tl.int64) & 0xFFFFFFFF) >> (first_nibble % 8 * 4)
        pair0 = _pair(word, low_bytes, window, counts, scale, zero, 0)
        pair1 = _pair(word, low_bytes, window, counts, scale, zero, 2)
        pair2 = _pair(word, high_bytes, window, counts, scale, zero, 4)
        pair3 = _pair(word, high_bytes, window, counts, scale, zero, 6)
    else:
        pair0, pair1, pair2, pair3 = tl.inline_asm_elementwise(
            _ASSEMBLY,
            _OPERANDS,
            [
                word,
                low_bytes,
                high_bytes,
                nibbles,
                next_nibbles,
                first_nibble * 4,
                counts,
                scale * 0x10001,
                zero * 0x10001 + 0x43004300,
            ],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return pair0, pair1, pair2, pair3


@triton.jit
def _pair(word, residual, window, counts, scale, zero, lane: tl.constexpr):  # type: ignore[no-untyped-def]
    first = _weight(word, residual, window, counts, scale, zero, lane)
    return first | _weight(word, residual, window, counts, scale, zero, lane + 1) << 16


@triton.jit
def _weight(word, residual, window, counts, scale, zero, lane: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of one weight, int32."""
    step = ((word >> 4 * lane) & 0xF) - zero
    byte = (residual >> 8 * (lane % 4)) & 0xFF
    near = centre_bits(step, scale) + byte - ((byte & 0x80) << 1)
    before = (counts >> (4 * lane - 4)) & 0xF if lane > 0 else 0
    nibble = ((window >> 4 * before) & 0xF).to(tl.int32)
    distance = byte | (nibble & 7) << 8
    far = (nibble >> 3) << 15 | tl.where(distance == 2047, 0, scale - distance)
    return tl.where(step == 0, far, near) & 0xFFFF
