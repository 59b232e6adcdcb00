"""Building is durable unit by unit: whatever interrupts it, the finished store has the same bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import synthetic_store
from moespeq.errors import StorageError, StoreError, UsageError
from moespeq.nested import Layout
from moespeq.store import Store, StoreWriter
from synthetic_store import append, build, files_of, finish, new_writer


def test_a_finished_store_leaves_nothing_beside_it(tmp_path: Path) -> None:
    build(tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense-source", "store"]


def test_uncommitted_records_are_cut_off_and_written_again(tmp_path: Path) -> None:
    whole = files_of(build(tmp_path / "whole"))
    out = tmp_path / "resumed"
    with new_writer(out) as writer:
        append(writer, 0)
        base, record = synthetic_store.records()[3]
        writer.append(memoryview(base), memoryview(record))
    with new_writer(out) as writer:
        assert writer.num_records == synthetic_store.NUM_EXPERTS
        writer.write_dense("model.safetensors", [memoryview(whole["dense/model.safetensors"])])
        append(writer, 1)
        finish(writer)
    assert files_of(out) == whole


def test_a_dense_file_in_the_journal_is_not_written_again(tmp_path: Path) -> None:
    with new_writer(tmp_path / "store") as writer:
        writer.write_dense("a.safetensors", [memoryview(b"data")])
    with new_writer(tmp_path / "store") as writer:
        writer.write_dense("a.safetensors", iter(lambda: pytest.fail("read again"), None))
        assert writer.durable.dense["dense/a.safetensors"].size_bytes == 4


@pytest.mark.parametrize("torn", [b'{"num_records": 3, "base', b"\0\0\0\n", b'{"num_records": 6}'])
def test_a_torn_last_line_of_the_journal_is_dropped(tmp_path: Path, torn: bytes) -> None:
    out = tmp_path / "store"
    with new_writer(out) as writer:
        append(writer, 0)
    with (tmp_path / "store.partial" / "journal").open("ab") as journal:
        journal.write(torn)
    with new_writer(out) as writer:
        assert writer.num_records == synthetic_store.NUM_EXPERTS
        append(writer, 1)
    with new_writer(out) as writer:
        assert writer.num_records == 2 * synthetic_store.NUM_EXPERTS


@pytest.mark.parametrize(
    "line",
    [
        "5",
        "[]",
        "{}",
        '"path"',
        '{"path": "dense/a", "size_bytes": null, "sha256": ""}',
        '{"num_records": 6, "base_end": 6, "experts_ends": [6], "layer": 1, "layout": "zz"}',
    ],
)
def test_a_whole_line_of_the_journal_that_is_no_unit_is_explained(tmp_path: Path, line: str) -> None:
    new_writer(tmp_path / "store").close()
    with (tmp_path / "store.partial" / "journal").open("a") as journal:
        journal.write(line + "\n")
    with pytest.raises(StoreError, match=r"journal is damaged; remove .*store\.partial and prepare again"):
        new_writer(tmp_path / "store")


def test_a_layer_taken_back_is_written_again_even_after_an_interruption(tmp_path: Path) -> None:
    out = tmp_path / "store"
    with new_writer(out) as writer:
        append(writer, 0)
        append(writer, 1)
        writer.restart_layer(1, Layout.CODE_WIDTH)
    with new_writer(out) as writer:
        assert writer.num_records == synthetic_store.NUM_EXPERTS
        assert writer.durable.layouts == {0: Layout.FIXED, 1: Layout.CODE_WIDTH}
        append(writer, 1, Layout.CODE_WIDTH)
        finish(writer)
    whole = files_of(build(tmp_path / "whole"))
    assert files_of(out)["experts.bin"] == whole["experts.bin"]
    with Store.open(out) as store:
        assert store.manifest.layouts == (Layout.FIXED, Layout.CODE_WIDTH)


def test_a_partial_store_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "store"
    with new_writer(out) as writer:
        append(writer, 0)
    with pytest.raises(StoreError, match="another checkpoint or with other options"):
        StoreWriter(out, {"checkpoint": "two"}, num_experts=synthetic_store.NUM_EXPERTS, needed_bytes=0)
    with new_writer(out) as writer:
        assert writer.num_records == synthetic_store.NUM_EXPERTS


def test_bytes_lost_below_the_journal_are_noticed(tmp_path: Path) -> None:
    out = tmp_path / "store"
    with new_writer(out) as writer:
        append(writer, 0)
    os.truncate(tmp_path / "store.partial" / "store" / "experts.bin", 10)
    with pytest.raises(StoreError, match="lost bytes"):
        new_writer(out)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_dense_file_that_changed_is_written_again(tmp_path: Path) -> None:
    with new_writer(tmp_path / "store") as writer:
        writer.write_dense("a.safetensors", [memoryview(b"data")])
        writer.write_dense("b.safetensors", [memoryview(b"more")])
    dense = tmp_path / "store.partial" / "store" / "dense"
    flip(dense / "a.safetensors", 1)
    with new_writer(tmp_path / "store") as writer:
        writer.write_dense("a.safetensors", [memoryview(b"data")])
        writer.write_dense("b.safetensors", iter(lambda: pytest.fail("written again"), None))
        assert list(writer.durable.dense) == ["dense/a.safetensors", "dense/b.safetensors"]
    assert (dense / "a.safetensors").read_bytes() == b"data"


@pytest.mark.parametrize(
    ("name", "position", "num_sound"),
    [("base.bin", 10, 0), ("experts.bin", 4096 + 10, 1), ("experts.bin", -1, 5), ("records.bin", 2 * 32 + 1, 2)],
)
def test_records_from_the_first_that_changed_are_written_again(
    tmp_path: Path, name: str, position: int, num_sound: int
) -> None:
    out, whole = tmp_path / "store", files_of(build(tmp_path / "whole"))
    with new_writer(out) as writer:
        writer.write_dense("model.safetensors", [memoryview(whole["dense/model.safetensors"])])
        append(writer, 0)
        append(writer, 1)
    flip(tmp_path / "store.partial" / "store" / name, position)
    with new_writer(out) as writer:
        assert writer.num_records == num_sound
    with new_writer(out) as writer:
        assert writer.num_records == num_sound
        for position, (base, record) in enumerate(synthetic_store.records()[num_sound:], num_sound):
            writer.append(memoryview(base), memoryview(record))
            writer.commit(position // synthetic_store.NUM_EXPERTS, Layout.FIXED)
        finish(writer)
    assert files_of(out) == whole


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a" * 300, "a" * 250, "file/below", "link"])
def test_an_output_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("link").symlink_to("nothing")
    with pytest.raises(UsageError, match=r"is no name|cannot be written \(|is a link to nothing"):
        new_writer(Path(name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_what_a_kill_after_the_rename_leaves_is_removed(tmp_path: Path) -> None:
    build(tmp_path / "store")
    partial = tmp_path / "store.partial"
    for names, stays in [(["journal", "lock"], False), (["journal", "mine"], True)]:
        partial.mkdir()
        for name in names:
            (partial / name).touch()
        with pytest.raises(StoreError, match="exists already"):
            new_writer(tmp_path / "store")
        assert partial.exists() is stays


def test_an_existing_output_is_never_overwritten(tmp_path: Path) -> None:
    build(tmp_path / "store")
    with pytest.raises(StoreError, match="exists already"):
        new_writer(tmp_path / "store")
    assert not (tmp_path / "store.partial").exists()


def test_two_writers_never_share_a_store(tmp_path: Path) -> None:
    with new_writer(tmp_path / "store"), pytest.raises(StoreError, match="Another process is preparing"):
        new_writer(tmp_path / "store")
    new_writer(tmp_path / "store").close()


def test_a_second_process_is_told_and_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    hold = "import fcntl as f, sys; x = open(sys.argv[1], 'w'); f.flock(x, 2); print(1, flush=True); input()"
    (tmp_path / "store.partial").mkdir()
    command = [sys.executable, "-c", hold, str(tmp_path / "store.partial" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(StoreError, match="Another process is preparing"):
            new_writer(tmp_path / "store")
        holder.kill()
    new_writer(tmp_path / "store").close()


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"needs .* TiB and its disk has .* free"):
        new_writer(tmp_path / "store", needed_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_is_durable_and_says_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "store"
    write = os.write

    def fill_up(fd: int, data: memoryview) -> int:
        if len(data) > 65_536:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2 + 1])

    with new_writer(out, needed_bytes=500_000) as writer:
        append(writer, 0)
        monkeypatch.setattr(os, "write", fill_up)
        with pytest.raises(StorageError, match=r"is full: .* are still needed and .* are free.*goes on"):
            append(writer, 1)
    monkeypatch.undo()
    with new_writer(out) as writer:
        writer.write_dense(
            "model.safetensors", [memoryview(files_of(build(tmp_path / "w"))["dense/model.safetensors"])]
        )
        append(writer, 1)
        finish(writer)
    assert files_of(out) == files_of(tmp_path / "w")
