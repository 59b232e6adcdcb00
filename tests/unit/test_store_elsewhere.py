"""Expert records on several disks: the same records, dealt by layer, and nothing of another store is touched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from moespeq.errors import StorageError, StoreError, UsageError
from moespeq.store import DiskSource, Store
from moespeq.store.elsewhere import require_separate
from synthetic_store import append, build, files_of, finish, new_writer, records


def all_records(path: Path) -> list[bytes]:
    with Store.open(path) as store:
        source, found = DiskSource(store, verify=True), []
        for key in store.keys():  # noqa: SIM118
            buffer = bytearray(source.num_bytes(key))
            source.read_into(key, memoryview(buffer))
            found.append(bytes(buffer))
    return found


def test_layers_are_dealt_to_the_files_and_read_back_from_them(tmp_path: Path) -> None:
    store = build(tmp_path / "store", elsewhere=[tmp_path / "disk"])
    (other,) = (tmp_path / "disk").iterdir()
    assert (store / "experts-1.bin").resolve() == other
    assert other.name.startswith("store-")
    assert other.name.endswith(".experts-1.bin")
    assert all_records(store) == [record for _, record in records()]
    first, second = records()[0][1], records()[3][1]
    assert (store / "experts.bin").read_bytes()[: len(first)] == first
    assert other.read_bytes()[: len(second)] == second


def test_two_stores_of_one_name_share_a_disk(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        build(tmp_path / name / "store", elsewhere=[tmp_path / "disk"])
    assert len(list((tmp_path / "disk").iterdir())) == 2
    assert all_records(tmp_path / "a" / "store") == all_records(tmp_path / "b" / "store")


def test_an_interrupted_store_on_two_disks_is_gone_on_with(tmp_path: Path) -> None:
    disk = [tmp_path / "disk"]
    whole = files_of(build(tmp_path / "whole", elsewhere=disk))
    with new_writer(tmp_path / "store", elsewhere=disk) as writer:
        writer.write_dense("model.safetensors", [memoryview(whole["dense/model.safetensors"])])
        append(writer, 0)
        append(writer, 1)
    (link,) = (tmp_path / "store.partial" / "store").glob("experts-1.bin")
    damaged = bytearray(link.read_bytes())
    damaged[5000] ^= 1  # in the second record of the second layer
    link.write_bytes(damaged)
    with new_writer(tmp_path / "store", elsewhere=disk) as writer:
        assert writer.num_records == 3
        append(writer, 1)
        finish(writer)
    assert files_of(tmp_path / "store") == whole
    assert len(list((tmp_path / "disk").iterdir())) == 2


def test_a_full_other_disk_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"/disk needs .* TiB and its disk has .* free"):
        new_writer(tmp_path / "big", elsewhere=[tmp_path / "disk"], needed_elsewhere_bytes=1 << 60)
    with new_writer(tmp_path / "store", elsewhere=[tmp_path / "disk"]) as writer:
        append(writer, 0)
        full = writer._fds["experts-1.bin"]
        write = os.write

        def fill_up(fd: int, data: memoryview) -> int:
            if fd == full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data)

        monkeypatch.setattr(os, "write", fill_up)
        with pytest.raises(StorageError, match=r"The disk of .*/disk is full: .*goes on where it stopped"):
            append(writer, 1)


@pytest.mark.parametrize("name", ["experts-1.bin", "base.bin"])
def test_a_disk_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    store = build(tmp_path / "store", elsewhere=[tmp_path / "disk"])
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    with pytest.raises(StoreError, match=r"leads to .*/disk/.*, which is not there; mount that disk"):
        Store.open(store)
    (tmp_path / "unplugged").rename(tmp_path / "disk")
    (store / name).unlink()
    (store / name).symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match=rf"{name} is a link out of the store, to /etc/passwd"):
        Store.open(store)


def test_folders_that_are_one_or_lie_in_the_store_are_refused(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "store"
    require_separate(out, [disk, tmp_path / "other"])
    for folders in ([disk, tmp_path / "x" / ".." / "disk"], [out / "below"], [tmp_path / "store.partial" / "store"]):
        with pytest.raises(UsageError, match=r"given twice|lies in the store itself"):
            require_separate(out, folders)
