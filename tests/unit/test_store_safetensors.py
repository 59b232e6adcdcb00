"""Headers are untrusted: sound files are read exactly, all else is a CheckpointError that names the file."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moespeq.errors import CheckpointError
from moespeq.store import SafetensorsFile
from moespeq.store.safetensors_file import build_header

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 7),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "sound.safetensors", metadata={"format": "pt"})
    return tmp_path / "sound.safetensors"


def write(path: Path, header: Any, data: bytes = b"", *, header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)
    return path


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_tensor_of_a_sound_file_is_read_bit_for_bit(sound: Path) -> None:
    file = SafetensorsFile.open(sound)
    found = {item.name: (item.shape, file.read(item.offset, item.num_bytes).tobytes()) for item in file.entries}
    assert found == {
        name: (tuple(t.shape), t.view(-1).view(torch.uint8).numpy().tobytes()) for name, t in TENSORS.items()
    }
    assert sound.read_bytes().startswith(file.header)


def test_reads_are_page_aligned_fresh_memory(sound: Path) -> None:
    file = SafetensorsFile.open(sound)
    first = file.entries[-1]
    one, other = file.read(first.offset, first.num_bytes), file.read(first.offset, first.num_bytes)
    assert one.ctypes.data % 4096 == other.ctypes.data % 4096 == 0
    one[:] = 0
    assert other.any()


def test_chunks_of_a_tensor_are_the_tensor(sound: Path) -> None:
    file = SafetensorsFile.open(sound)
    for item in file.entries:
        assert b"".join(file.chunks(item, 7)) == file.read(item.offset, item.num_bytes).tobytes()


def test_a_built_header_is_one_that_safetensors_loads(sound: Path, tmp_path: Path) -> None:
    file = SafetensorsFile.open(sound)
    copy = tmp_path / "copy.safetensors"
    data = b"".join(file.read(item.offset, item.num_bytes).tobytes() for item in file.entries)
    copy.write_bytes(build_header(file.entries) + data)
    loaded = load_file(copy)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"not json", b""),
        (b"[]", b""),
        (b"\xff\xfe{}", b""),
        (b"[" * 100_000, b""),
        (b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',) * 2), b"x"),
        ({"a": 3}, b""),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
        ({"a": {**entry(0, 1), "extra": 0}}, b"x"),
        ({"a": entry(0, 1, dtype="U9")}, b"x"),
        ({"a": entry(0, 1, dtype=["U8"])}, b"x"),
        ({"a": entry(0, 1, shape=[-1, -1])}, b"x"),
        ({"a": entry(0, 1, shape=[True])}, b"x"),
        ({"a": entry(0, 1, shape=[1.0])}, b"x"),
        ({"a": entry(0, 2, shape=[3])}, b"xx"),
        ({"a": entry(0, 2, shape=[3], dtype="F4")}, b"xx"),
        ({"a": {**entry(0, 1), "data_offsets": [0, 1, 1]}}, b"x"),
        ({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx"),
        ({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx"),
        ({"a": entry(1, 2)}, b"xx"),
        ({"a": entry(0, 1)}, b""),
        ({"a": entry(0, 1)}, b"xx"),
        ({"a": entry(0, 1 << 70, shape=[1 << 35, 1 << 35])}, b"x"),
        (b'{"a":' + b"9" * 10_000 + b"}", b""),
        (b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}}' % b",".join([b"9" * 4_000] * 3), b"x"),
        ({"a": entry(0, 1, shape=[1 << 62] * 50_000)}, b"x"),
        ({"a": {**entry(0, 1), "data_offsets": [-1, 0]}}, b"x"),
        ({"a": {**entry(0, 1), "data_offsets": [0.0, 1.0]}}, b"x"),
        ({"a": {**entry(0, 1), "data_offsets": [False, True]}}, b"x"),
        ({"a": {**entry(0, 1), "data_offsets": [0, float("nan")]}}, b"x"),
        ({"a": {**entry(0, 1), "data_offsets": [0, 1 << 64]}}, b"x"),
        ({"a": {**entry(0, 1), "data_offsets": [1, 0]}}, b"x"),
        ({"a": entry(0, 1), "b": entry(0, 1)}, b"x"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        (b'{"__metadata__":{},"__metadata__":{}}', b""),
    ],
)
def test_a_hostile_header_is_refused_naming_the_file(tmp_path: Path, header: Any, data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        SafetensorsFile.open(write(tmp_path / "bad.safetensors", header, data))


@pytest.mark.parametrize("text", [b"[],", b"999,", b'"a",', b'{"a":'], ids=["lists", "numbers", "texts", "depth"])
def test_megabytes_of_values_are_refused_before_they_become_objects(tmp_path: Path, text: bytes) -> None:
    path = write(tmp_path / "bad.safetensors", b'{"a":[' + text * 4_000_001 + b"0]}")
    began_s = time.process_time()
    with pytest.raises(CheckpointError, match=r"bad\.safetensors .* more than 4,000,000 values"):
        SafetensorsFile.open(path)
    assert time.process_time() - began_s < 3, "counting takes 0.1 s, parsing 100 MB of them minutes"


@pytest.mark.parametrize(
    "header",
    [{"n" * 1_000_000: 3}, {"a": entry(0, 1, dtype="n" * 1_000_000)}, {"\x1b[2J": entry(0, 1, shape=[1 << 62] * 9999)}],
)
def test_a_refusal_is_short_and_holds_no_control_character_whatever_the_header_says(
    tmp_path: Path, header: Any
) -> None:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile.open(write(tmp_path / "bad.safetensors", header, b"x"))
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("header_bytes", [3, 1 << 40, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_is_refused_before_memory_is_taken(tmp_path: Path, header_bytes: int) -> None:
    with pytest.raises(CheckpointError, match="header claims"):
        SafetensorsFile.open(write(tmp_path / "bad.safetensors", b"{}", header_bytes=header_bytes))


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 20])
def test_a_file_cut_short_is_refused(sound: Path, num_bytes: int) -> None:
    sound.write_bytes(sound.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"sound\.safetensors"):
        SafetensorsFile.open(sound)


def test_a_file_cut_after_it_was_opened_is_noticed_when_read(sound: Path) -> None:
    file = SafetensorsFile.open(sound)
    sound.write_bytes(sound.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut to"):
        file.read(file.entries[-1].offset, file.entries[-1].num_bytes)


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile.open(tmp_path / "absent.safetensors")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 40),
)
def test_no_mutation_of_a_header_raises_anything_else(sound: Path, edits: list[tuple[int, int]], cut: int) -> None:
    mutated = bytearray(sound.read_bytes())
    for position, value in edits:
        mutated[position % len(mutated)] = value
    target = sound.with_name("mutated.safetensors")
    target.write_bytes(mutated[: len(mutated) - cut])
    try:
        file = SafetensorsFile.open(target)
    except CheckpointError:
        return
    assert sum(item.num_bytes for item in file.entries) + len(file.header) == file.size_bytes
