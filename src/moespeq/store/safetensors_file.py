"""One safetensors file: its header, read as untrusted input, and exact byte ranges of its data.

The format is a little-endian u64 header length, that many bytes of JSON, then the tensors' data without
holes. A checkpoint may come from anywhere, so every number is checked against the file before it is used;
whatever is wrong raises CheckpointError naming the file. Data is read with pread into fresh memory, never
mapped: mapped tensors are 8-byte aligned, which changes fp32 results, and mappings thrash when the model
exceeds memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from moespeq.errors import CheckpointError, StorageError
from moespeq.store.untrusted import is_text, parse_json, shown

__all__ = ["Bytes", "SafetensorsFile", "TensorEntry", "aligned_empty", "build_header", "parse_header"]

Bytes = npt.NDArray[np.uint8]

MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_METADATA_KEY = "__metadata__"
_MAX_COUNT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file whose header was checked.

    `header` is verbatim, its length word included; `entries` are in order of offset.
    """

    path: Path
    size_bytes: int
    header: bytes
    entries: tuple[TensorEntry, ...]

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header. Raises CheckpointError."""
        try:
            with path.open("rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                header = _read_header(file, path, size_bytes)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
        return cls(path, size_bytes, header, parse_header(header, size_bytes, path))

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """The bytes [offset, offset + num_bytes) of the file in fresh, page-aligned memory.

        Raises CheckpointError when the file was cut since it was opened, StorageError when a read fails.
        """
        buffer = aligned_empty(num_bytes)
        done_bytes = 0
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while done_bytes < num_bytes:
                    got_bytes = os.preadv(fd, [buffer.data[done_bytes:]], offset + done_bytes)
                    if got_bytes == 0:
                        raise _damaged(self.path, f"it was cut to {offset + done_bytes} bytes while being read")
                    done_bytes += got_bytes
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(
                f"Reading {self.path} at byte {offset} failed ({error.strerror}); check the disk."
            ) from error
        return buffer

    def chunks(self, entry: TensorEntry, chunk_bytes: int) -> Iterator[memoryview]:
        """One tensor's bytes, at most `chunk_bytes` at a time; raises as `read` does."""
        for start in range(0, entry.num_bytes, chunk_bytes):
            yield self.read(entry.offset + start, min(chunk_bytes, entry.num_bytes - start)).data


def aligned_empty(num_bytes: int, alignment_bytes: int = 4096) -> Bytes:
    """Uninitialised bytes whose address is a multiple of `alignment_bytes`."""
    room = np.empty(num_bytes + alignment_bytes, dtype=np.uint8)
    start = -room.ctypes.data % alignment_bytes
    return room[start : start + num_bytes]


def parse_header(header: bytes, size_bytes: int, path: Path) -> tuple[TensorEntry, ...]:
    """The tensors that `header` (length word included) declares for a file of `size_bytes`, by offset."""
    fields = _decode_json(header[8:], path)
    fields.pop(_METADATA_KEY, None)
    entries = [_parse_entry(name, field, len(header), path) for name, field in fields.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    _check_layout(entries, len(header), size_bytes, path)
    return tuple(entries)


def build_header(entries: Sequence[TensorEntry], notes: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The header of a file that holds these tensors one after the other; their own offsets are not used.

    notes: texts for its metadata.
    """
    fields: dict[str, Any] = {_METADATA_KEY: {"format": "pt", **notes}}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.num_bytes]
        fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.num_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_header(file: BufferedReader, path: Path, size_bytes: int) -> bytes:
    word = file.read(8)
    if len(word) < 8:
        raise _damaged(path, f"its {size_bytes} bytes have no room for a header")
    header_bytes: int = struct.unpack("<Q", word)[0]
    if header_bytes > min(size_bytes - 8, MAX_HEADER_BYTES):
        raise _damaged(path, f"its header claims {header_bytes} of the file's {size_bytes} bytes")
    text = file.read(header_bytes)
    if len(text) < header_bytes:
        raise _damaged(path, "it was cut inside its header while being read")
    return word + text


def _decode_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _damaged(path, "its header is not a JSON object")
    return fields


def _parse_entry(name: str, field: Any, data_start: int, path: Path) -> TensorEntry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"tensor {shown(name)} is not described by dtype, shape and data_offsets")
    if not is_text(name):
        raise _damaged(path, f"the name {shown(name)} of a tensor is no Unicode text")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _damaged(path, f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {shown(name)} has a shape or offsets that are not whole numbers below 2^63")
    begin, end = offsets
    num_bits = _num_elements(shape, 8 * (end - begin)) * DTYPE_BITS[dtype]
    if num_bits != 8 * (end - begin):
        raise _damaged(path, f"tensor {shown(name)} of shape {shown(shape)} and {dtype} has offsets {offsets}")
    return TensorEntry(name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_COUNT for value in values)


def _num_elements(shape: Sequence[int], most: int) -> int:
    """The product of `shape`, or any number above `most` where it is larger: it may have a million digits."""
    if 0 in shape:
        return 0
    product = 1
    for count in shape:
        product *= count
        if product > most:
            break
    return product


def _check_layout(entries: Sequence[TensorEntry], data_start: int, size_bytes: int, path: Path) -> None:
    end = data_start
    for entry in entries:
        if entry.offset != end:
            raise _damaged(path, f"tensor {shown(entry.name)} begins at byte {entry.offset} and not at {end}")
        end += entry.num_bytes
    if end != size_bytes:
        raise _damaged(path, f"its tensors end at byte {end} and the file at {size_bytes}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound safetensors file: {what}; download it again.")
