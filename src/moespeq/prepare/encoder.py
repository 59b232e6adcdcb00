"""Experts become records: on the CPU, several beside each other, or on a GPU, one at a time.

The same torch operations run on both, each exactly rounded, so the bytes do not depend on where they were made, and a
store begun on one device may be finished on another. On a GPU the threads around it read and checksum while one expert
is encoded; only one is ever in its memory, and one that does not fit there is encoded on the CPU.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from moespeq.errors import UsageError
from moespeq.nested import BaseFormat, Layout, Written, encode_base, encode_record, exact_weight, pack_base
from moespeq.prepare.experts import view_of

__all__ = ["EncodedExpert", "ExpertEncoder", "default_layout"]

_CPU = torch.device("cpu")


def default_layout(device: str) -> Layout:
    """The layout that is faster end to end where experts are encoded on `device`.

    A GPU decodes both faster than any link carries them, so the smaller one wins; a CPU decodes code-width five times
    slower than fixed.
    """
    return Layout.FIXED if _resolve(device) == _CPU else Layout.CODE_WIDTH


@dataclass(frozen=True, slots=True)
class EncodedExpert:
    """The two records of one expert, uint8 [n] in host memory, and their CRC-32."""

    base: Tensor
    record: Tensor
    base_crc32: int
    record_crc32: int


class ExpertEncoder:
    """Encodes experts of one format. Safe to use from several threads; leaving the context gives GPU memory back."""

    def __init__(self, fmt: BaseFormat, device: str) -> None:
        self._fmt, self._device = fmt, _resolve(device)
        self._turn: AbstractContextManager[object] = nullcontext() if self._device == _CPU else threading.Lock()

    def encode(self, matrices: Sequence[Written], layout: Layout) -> EncodedExpert:
        """The records of one expert's matrices [out, in], written as `layout` has them."""
        try:
            with self._turn:
                base, record = self._encode_on(self._device, matrices, layout)
        except torch.cuda.OutOfMemoryError:
            base, record = self._encode_on(_CPU, matrices, layout)
        return EncodedExpert(base, record, zlib.crc32(view_of(base)), zlib.crc32(view_of(record)))

    def _encode_on(self, device: torch.device, matrices: Sequence[Written], layout: Layout) -> tuple[Tensor, Tensor]:
        there = [matrix.to(device) for matrix in matrices]
        bases = [encode_base(exact_weight(matrix, layout), self._fmt) for matrix in there]
        return pack_base(bases).cpu(), encode_record(there, bases, self._fmt, layout).cpu()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._device != _CPU:
            torch.cuda.empty_cache()


def _resolve(device: str) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"Unknown device '{device}'; use auto, cpu or cuda.")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UsageError("device 'cuda' was asked for and torch finds no GPU; use 'cpu', which writes the same bytes.")
    return torch.device("cuda") if has_cuda and device != "cpu" else _CPU
