"""32 weights of the fixed layout at once: a unit of codes and its residual to sixteen packed pairs of bf16.

Two forms of one function. `_weight` runs everywhere and reads like the format; on a CUDA device ASSEMBLY does the same
in about five integer instructions a weight:

- a code in the low bits of 0x4300 is the bf16 128 + code: bf16(step * scale) is an exact subtraction and one product;
- a byte permutation widens residual bytes with their sign, or puts a nibble above them;
- a word's nibbles are spread to bytes once, and the counts of zero codes before each code, four bits each, are the
  permutation's selector that brings each to its place;
- a far weight is scale - (sign << 15 | distance) modulo 2^16, the complement of ~scale + that;
- distance 2047 is a zero. It can only be where a nibble's three low bits are set, which is rare: then the exact form
  runs, in which 2047 stands in for the scale, so that only the sign is left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moespeq.kernels.elements import centre_bits

__all__ = ["ASSEMBLY", "decode_unit"]

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# $0-$15 pairs of weights; $16-$19 words of eight codes; $20-$27 residual bytes; $28-$31 each word's next eight nibbles;
# $32-$35 counts; $36 the scale's bits twice; $37 the zero code twice, above 0x43004300.
_WORD = """
    shl.b32 u, ${nibbles}, 4;
    lop3.b32 u, ${nibbles}, u, 0x07070707, 0xe4;
    and.b32 u, u, 0x87878787;
    shr.u32 v, ${nibbles}, 4;
    lop3.b32 v, v, ${nibbles}, 0x07070707, 0xe4;
    and.b32 v, v, 0x87878787;
    prmt.b32 n, u, v, 0x5140;
    prmt.b32 v, u, v, 0x7362;
    prmt.b32 low, n, v, ${counts};
    shr.u32 u, ${counts}, 16;
    prmt.b32 high, n, v, u;
    shr.u32 v, ${codes}, 4;
"""
_PAIR = """
    prmt.b32 c, ${codes}, v, 0x{code};
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    set.eq.u32.bf16x2 k, c, $37;
    sub.rn.bf16x2 c, c, $37;
    mul.rn.bf16x2 c, c, $36;
    prmt.b32 b, ${bytes}, 0, 0x{signed};
    add.s16x2 c, c, b;
    prmt.b32 b, ${bytes}, {half}, 0x{widened};
"""
_QUICK = """
    add.s16x2 b, b, s;
    lop3.b32 ${pair}, k, b, c, 0x3a;
"""
_EXACT = """
    and.b32 n, b, 0x07ff07ff;
    set.eq.u32.bf16x2 n, n, z;
    lop3.b32 n, n, $36, z, 0x53;
    add.s16x2 b, b, n;
    lop3.b32 ${pair}, k, b, c, 0x3a;
"""


def _unit(far: str) -> str:
    lines = []
    for word in range(4):
        operands = {"codes": 16 + word, "nibbles": 28 + word, "counts": 32 + word}
        lines.append(_WORD.format(**operands))
        for pair in range(4):
            lines.append(
                (_PAIR + far).format(
                    codes=operands["codes"],
                    pair=4 * word + pair,
                    code=f"{0x4400 + 0x1111 * pair:04x}",
                    bytes=20 + 2 * word + pair // 2,
                    half=("low", "high")[pair // 2],
                    signed=("9180", "b3a2")[pair % 2],
                    widened=("5140", "7362")[pair % 2],
                )
            )
    return "".join(lines)


def _assembly() -> str:
    marks = ["mov.b32 u, 0;"]
    for word in range(4):
        marks += [f"and.b32 n, ${28 + word}, 0x77777777;", "add.u32 n, n, 0x11111111;"]
        marks += ["lop3.b32 u, u, n, 0x88888888, 0xf8;"]
    return "\n".join(
        (
            "{",
            ".reg .pred marked;",
            ".reg .b32 n, u, v, c, k, b, s, z, low, high;",
            *marks,
            "setp.ne.u32 marked, u, 0;",
            "not.b32 s, $36;",
            "@marked bra EXACT;",
            _unit(_QUICK),
            "bra DONE;",
            "EXACT:",
            "mov.b32 z, 0x07ff07ff;",
            _unit(_EXACT),
            "DONE:",
            "}",
        )
    )


ASSEMBLY = _assembly()
_ASSEMBLY = tl.constexpr(ASSEMBLY)
_OPERANDS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 22))
_PAIRS = tl.constexpr((tl.int32,) * 16)


@triton.jit
def decode_unit(words, residual, nibbles, marks, scale, zero):  # type: ignore[no-untyped-def]
    """Sixteen int32 tensors, two bf16 each in element order. All arguments are int32 of one shape.

    words: 4; residual: 8, four bytes each; nibbles: for each word those of its zero codes, from bit 0 on; marks: for
    each word the top bit of its zero codes; scale: its bits; zero: the zero code.
    """
    counts = ()
    for word in tl.static_range(4):
        counts += (marks[word] * 0x22222222,)  # the zero codes before each code, four bits each
    if _IS_INTERPRETED:
        pairs = ()
        for word in tl.static_range(4):
            for pair in tl.static_range(4):
                first = _weight(words, residual, nibbles, counts, scale, zero, word, 2 * pair)
                second = _weight(words, residual, nibbles, counts, scale, zero, word, 2 * pair + 1)
                pairs += (first | second << 16,)
    else:
        pairs = tl.inline_asm_elementwise(
            _ASSEMBLY,
            _OPERANDS,
            words + residual + nibbles + counts + (scale * 0x10001, zero * 0x10001 + 0x43004300),
            dtype=_PAIRS,
            is_pure=True,
            pack=1,
        )
    return pairs


@triton.jit
def _weight(words, residual, nibbles, counts, scale, zero, word: tl.constexpr, lane: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits of one weight by the format's rules, int32."""
    step = ((words[word] >> 4 * lane) & 0xF) - zero
    byte = (residual[2 * word + lane // 4] >> 8 * (lane % 4)) & 0xFF
    near = centre_bits(step, scale) + byte - ((byte & 0x80) << 1)
    nibble = nibbles[word] >> 4 * ((counts[word] >> 4 * lane) & 0xF)
    distance = byte | (nibble & 7) << 8
    far = (nibble >> 3 & 1) << 15 | tl.where(distance == 2047, 0, scale - distance)
    return tl.where(step == 0, far, near) & 0xFFFF
