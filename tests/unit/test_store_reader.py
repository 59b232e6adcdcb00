"""Records come back exactly, from any buffer and any thread, and damage never does silently."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import synthetic_store
from moespeq.errors import StorageError, StoreError
from moespeq.ports import RecordSource
from moespeq.store import DiskSource, Store
from moespeq.store.record_file import RecordFile
from moespeq.store.safetensors_file import aligned_empty
from moespeq.types import ExpertKey

LAST = ExpertKey(1, 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(synthetic_store.build(tmp_path / "store")) as opened:
        yield opened


def test_every_base_and_record_is_what_was_written(store: Store) -> None:
    source = DiskSource(store, verify=True)
    assert isinstance(source, RecordSource)
    for key, (base, record) in zip(store.keys(), synthetic_store.records(), strict=True):
        base_buffer, buffer = bytearray(store.base_bytes(key)), bytearray(source.num_bytes(key))
        store.read_base_into(key, memoryview(base_buffer), verify=True)
        source.read_into(key, memoryview(buffer))
        assert (base_buffer, buffer) == (base, record)
    assert store.max_record_bytes() == max(synthetic_store.RECORD_BYTES)


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_no_byte_after_the_record_is_written_whatever_the_alignment(store: Store, shift: int) -> None:
    for key, (_, record) in zip(store.keys(), synthetic_store.records(), strict=True):
        buffer = aligned_empty(len(record) + 8192)
        buffer[:] = 0xEE
        DiskSource(store, verify=True).read_into(key, buffer.data[shift:])
        assert buffer[shift : shift + len(record)].tobytes() == record
        assert (np.delete(buffer, np.s_[shift : shift + len(record)]) == 0xEE).all()


def test_an_unaligned_buffer_does_not_turn_direct_reads_off(store: Store) -> None:
    span = store.records[LAST].record
    with RecordFile(store.path / "experts.bin") as file:
        was_direct = file.is_direct
        file.read_into(span, aligned_empty(span.num_bytes + 1).data[1:], verify=True)
        assert file.is_direct == was_direct


def test_large_records_begin_on_pages_so_that_direct_reads_apply(store: Store) -> None:
    for key in store.keys():  # noqa: SIM118
        span = store.records[key].record
        assert span.offset % (4096 if span.num_bytes >= 65536 else 64) == 0
    assert all(size % 4096 == 0 for size in store.manifest.experts_file_bytes)


def test_a_record_with_its_base_in_front_is_read_whole_or_from_behind_the_base(store: Store) -> None:
    source = DiskSource(store, verify=True, with_base=True)
    for key, (base, record) in zip(store.keys(), synthetic_store.records(), strict=True):
        assert (source.num_bytes(key), source.front_bytes(key)) == (len(base) + len(record), len(base))
        for skip_bytes, wanted in ((0, base + record), (len(base), record)):
            buffer = bytearray(len(wanted) + 5)
            source.read_into(key, memoryview(buffer), skip_bytes=skip_bytes)
            assert buffer == wanted + bytes(5)


def test_reads_from_several_threads_do_not_mix(store: Store) -> None:
    source, expected = DiskSource(store, verify=True), synthetic_store.records()
    keys = list(store.keys())

    def read(turn: int) -> bool:
        index = turn % len(keys)
        buffer = aligned_empty(source.num_bytes(keys[index]))
        source.read_into(keys[index], buffer.data)
        return buffer.tobytes() == expected[index][1]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RecordFile(store.path / "experts.bin")
    preadv, refusals = os.preadv, []

    def refuse_direct(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == file._direct_fd:
            refusals.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    span = store.records[LAST].record
    for _ in range(2):
        buffer = aligned_empty(span.num_bytes)
        file.read_into(span, buffer.data, verify=True)
        assert buffer.tobytes() == synthetic_store.records()[-1][1]
    assert len(refusals) <= 1
    assert not file.is_direct
    file.close()


def test_a_disk_that_fails_is_a_storage_error_naming_file_and_offset(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match=r"experts\.bin at byte \d+ failed"):
        DiskSource(store).read_into(LAST, aligned_empty(1 << 18).data)


def test_a_flipped_bit_is_noticed_when_checks_are_on(store: Store) -> None:
    span = store.records[LAST].record
    with (store.path / "experts.bin").open("r+b") as file:
        file.seek(span.offset + 70_001)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 8]))
    buffer = aligned_empty(span.num_bytes)
    DiskSource(store, verify=False).read_into(LAST, buffer.data)
    with pytest.raises(StoreError, match=r"experts\.bin is damaged.*moespeq verify"):
        DiskSource(store, verify=True).read_into(LAST, buffer.data)


@pytest.mark.parametrize("is_aligned", [True, False])
def test_a_file_cut_while_open_is_noticed(store: Store, is_aligned: bool) -> None:
    span = store.records[LAST].record
    os.truncate(store.path / "experts.bin", span.offset + 69_999)
    buffer = aligned_empty(span.num_bytes + 1).data[0 if is_aligned else 1 :]
    with pytest.raises(StoreError, match="it is truncated"):
        DiskSource(store).read_into(LAST, buffer)


@pytest.mark.parametrize("name", ["base.bin", "experts.bin", "records.bin", "pieces.bin", "dense/model.safetensors"])
def test_a_truncated_or_missing_file_is_noticed_at_opening(store: Store, name: str) -> None:
    path = store.path / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StoreError, match=r"bytes and should have"):
        Store.open(store.path)
    path.unlink()
    with pytest.raises(StoreError, match="is missing"):
        Store.open(store.path)


def test_dense_tensors_come_with_their_bytes(store: Store) -> None:
    assert [(entry.name, data.tobytes()) for entry, data in store.dense_tensors()] == [("norm", b"12345678")]


def test_a_flipped_bit_of_a_dense_file_gives_no_tensor(store: Store) -> None:
    path = store.path / "dense" / "model.safetensors"
    whole = path.read_bytes()
    for position in (whole.index(b"norm"), len(whole) - 3):  # another name; another value
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(StoreError, match=r"model\.safetensors is damaged"):
            next(store.dense_tensors())


def test_a_closed_store_may_be_closed_again(store: Store) -> None:
    store.close()
    store.close()
