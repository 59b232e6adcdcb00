"""A small machine for the assembly that kernels carry: enough of PTX to run it on one lane and look at the result."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

_MASK = 0xFFFFFFFF


def run_assembly(text: str, arguments: list[int], *, num_results: int) -> tuple[list[int], bool]:
    """The results $0.. of a text whose arguments follow them, and whether a branch was taken."""
    registers: dict[str, int] = {f"${num_results + place}": value & _MASK for place, value in enumerate(arguments)}
    lines = [line.strip() for line in re.split(r"[;\n]", text.replace(":", ":;")) if line.strip(" {}")]
    place, jumped = 0, False
    while place < len(lines):
        line = lines[place]
        place += 1
        if line.startswith(".") or line.endswith(":"):
            continue
        predicate, _, line = line.rpartition("@")[2].partition(" ") if line.startswith("@") else ("", "", line)
        if predicate and not registers[predicate]:
            continue
        if line.startswith("bra"):
            jumped = jumped or bool(predicate)
            place = lines.index(line.split()[1] + ":")
            continue
        operation, _, operands = line.partition(" ")
        target, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[name] if name in registers else int(name, 0) & _MASK for name in sources]
        registers[target] = _OPERATIONS[operation](*values) & _MASK
    return [registers[f"${number}"] for number in range(num_results)], jumped


def _halves(value: int) -> torch.Tensor:
    signed = [(half ^ 0x8000) - 0x8000 for half in (value & 0xFFFF, value >> 16)]
    return torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16)


def _joined(halves: torch.Tensor) -> int:
    low, high = (half & 0xFFFF for half in halves.view(torch.int16).tolist())
    return low | high << 16


def _permute(low: int, high: int, selector: int) -> int:
    octets = [(low | high << 32) >> 8 * place & 0xFF for place in range(8)]
    result = 0
    for place in range(4):
        chosen = selector >> 4 * place & 0xF
        octet = octets[chosen & 7]
        result |= (octet if chosen < 8 else 0xFF * (octet >> 7)) << 8 * place
    return result


def _lop3(first: int, second: int, third: int, table: int) -> int:
    return sum(
        (table >> (4 * (first >> bit & 1) + 2 * (second >> bit & 1) + (third >> bit & 1)) & 1) << bit
        for bit in range(32)
    )


def _equal(first: int, second: int) -> int:
    low, high = (_halves(first) == _halves(second)).tolist()
    return 0xFFFF * low | 0xFFFF0000 * high


_OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda value: value,
    "not.b32": lambda value: ~value,
    "and.b32": lambda first, second: first & second,
    "add.u32": lambda first, second: first + second,
    "shl.b32": lambda value, bits: value << bits,
    "shr.u32": lambda value, bits: value >> bits,
    "lop3.b32": _lop3,
    "prmt.b32": _permute,
    "setp.ne.u32": lambda first, second: int(first != second),
    "add.s16x2": lambda first, second: (first + second) & 0xFFFF | ((first >> 16) + (second >> 16)) << 16,
    "set.eq.u32.bf16x2": _equal,
    "sub.rn.bf16x2": lambda first, second: _joined(_halves(first) - _halves(second)),
    "mul.rn.bf16x2": lambda first, second: _joined(_halves(first) * _halves(second)),
}
