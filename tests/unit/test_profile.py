"""A profile is measured, written and read back; what cannot be measured is said."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moespeq import profiling
from moespeq.errors import StorageError, UsageError
from moespeq.hardware import disk
from moespeq.hardware.disk import measure_reads, scratch_file
from moespeq.hardware.link import measure_copies
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes, default_profile_path, require_writable
from moespeq.profiling import choose_device, profile_machine

KIB = 1024
PROFILE = MachineProfile(
    device="Some GPU",
    pinned_copy={65536: 2e10, 1 << 20: 5e10},
    pageable_copy={65536: 5e9},
    disk=(DiskRate(1, 1e9, True), DiskRate(4, 2e9, True)),
    models=(ModelTimes("some-model", 0.0015, {17: 0.008, 33: 0.01}, 1.5e12),),
)
OTHER = ModelTimes("other-model", 0.003, {33: 0.02}, 1e12)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    require_writable(path)
    PROFILE.save(path)
    assert MachineProfile.load(path) == PROFILE
    assert PROFILE.disk_bytes_per_s == 2e9
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("block_bytes", "bytes_per_s"), [(1, 2e10), (200_000, 2e10), (300_000, 5e10), (1 << 30, 5e10)])
def test_the_link_is_as_fast_as_the_block_of_the_nearest_size(block_bytes: int, bytes_per_s: float) -> None:
    assert PROFILE.link_bytes_per_s(block_bytes) == bytes_per_s


def test_without_pinned_copies_the_link_is_what_pageable_ones_reach() -> None:
    assert MachineProfile("cpu", {}, {65536: 3e9}, (DiskRate(1, 1e9, False),)).link_bytes_per_s(1) == 3e9


def test_models_measured_on_the_same_device_stay_and_one_measured_again_is_replaced() -> None:
    again = replace(PROFILE.models[0], draft_s_per_tok=0.001)
    earlier, later = replace(PROFILE, models=(*PROFILE.models, OTHER)), replace(PROFILE, models=(again,))
    assert later.with_models_of(earlier).models == (OTHER, again)
    assert replace(PROFILE, models=()).with_models_of(earlier).models == earlier.models
    assert later.with_models_of(replace(earlier, device="Another GPU")) == later


@pytest.mark.parametrize(
    "change",
    [
        {"disk": [{"num_threads": 1}]},
        {"disk": []},
        {"pageable_copy": {}},
        {"pinned_copy": {"big": 1.0}},
        {"pinned_copy": {"65536": 0}},
        {"pinned_copy": {"65536": float("nan")}},
        {"pinned_copy": {"0": 1.0}},
        {"pageable_copy": {"65536": 10**400}},
        {"models": [{"model": "some-model"}]},
        {"models": None},
        {"more": 1},
        {"device": None},
        {"disk": 3},
    ],
)
def test_anything_unexpected_in_a_profile_is_one_sentence_with_its_file(
    change: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(PROFILE.to_json()), **change}))
    with pytest.raises(UsageError, match=r"profile\.json cannot be read as a profile \(.*\); delete it, then") as error:
        MachineProfile.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": 2}', b'{"schema": 9}'])
def test_a_file_that_is_no_profile_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as a profile"):
        MachineProfile.load(tmp_path / "profile.json")


def test_no_profile_and_one_of_another_version_are_none(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert MachineProfile.load(path) is None
    path.write_text(json.dumps({**json.loads(PROFILE.to_json()), "schema": 1, "model": None}))
    assert MachineProfile.load(path) is None


def test_an_output_that_cannot_be_is_refused_and_nothing_is_left_by_asking(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error, words in (
        (tmp_path, UsageError, "is not a file; give --out the name of one"),
        (Path(os.devnull), UsageError, "is not a file"),
        (tmp_path / "file" / "profile.json", StorageError, "cannot be written"),
    ):
        with pytest.raises(error, match=words):
            require_writable(path)
    require_writable(tmp_path / "profile.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_link_to_a_profile_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "profile.json")
    PROFILE.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert MachineProfile.load(tmp_path / "there" / "profile.json") == PROFILE


def test_the_default_profile_lies_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    assert default_profile_path() == tmp_path / "profile.json"


def test_copies_are_measured_for_every_block_size() -> None:
    ticks = iter(range(1000))
    rates = measure_copies(
        torch.device("cpu"),
        is_pinned=False,
        block_bytes=(64 * KIB, 256 * KIB),
        area_bytes=1024 * KIB,
        now_s=lambda: float(next(ticks)),
    )
    assert rates == {64 * KIB: 1024 * KIB, 256 * KIB: 1024 * KIB}, "a try takes one tick and copies the area"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_reads_cover_whole_pages_of_the_file(tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", 64 * KIB)
    read = []
    honest = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = honest(fd, buffers, offset)
        read.append((offset, got))
        return got

    with scratch_file(tmp_path, 300 * KIB + 5) as path:
        monkeypatch.setattr(os, "preadv", counting)
        ticks = iter((0.0, 2.0))
        rate = measure_reads(path, num_threads=num_threads, max_bytes=1 << 30, now_s=lambda: next(ticks))
    assert rate.bytes_per_s == 150 * KIB
    blocks = read[1:] if rate.is_direct else read  # the first read asks whether direct reads work
    assert sorted(blocks) == [(start * KIB, min(64, 300 - start) * KIB) for start in range(0, 300, 64)]
    assert not path.exists()


def test_a_file_system_without_direct_reads_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.open

    def refusing(path: object, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return honest(path, flags, *rest, **named)  # type: ignore[call-overload]

    with scratch_file(tmp_path, 64 * KIB) as path:
        monkeypatch.setattr(os, "open", refusing)
        assert not measure_reads(path, num_threads=1, max_bytes=1 << 30).is_direct


def test_a_scratch_file_has_no_name_while_it_is_there(tmp_path: Path) -> None:
    with scratch_file(tmp_path, 5 * KIB) as path:
        assert list(tmp_path.iterdir()) == []
        assert path.stat().st_size == 5 * KIB


def test_a_scratch_file_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="No file can be written in"), scratch_file(tmp_path / "file", 1):
        pass

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"\(No space left on device\); free some space"), scratch_file(tmp_path, 1):
        pass


def test_an_error_ends_all_threads_that_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BLOCK_BYTES", 4 * KIB)
    starts: list[int] = []

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        starts.append(offset)
        if offset == 8 * KIB:
            raise OSError(5, "Input/output error")
        time.sleep(0.01)
        return 4 * KIB

    with scratch_file(tmp_path, 400 * KIB) as path:
        monkeypatch.setattr(disk, "_open_uncached", lambda path: (os.open(path, os.O_RDONLY), True))
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(OSError, match="Input/output error"):
            measure_reads(path, num_threads=2, max_bytes=1 << 30)
    assert len(starts) < 50, "of 100 blocks"


def test_the_machine_alone_is_profiled_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    monkeypatch.setattr(profiling, "measure_copies", lambda device, is_pinned: {65536: 1e9})
    said: list[str] = []
    found = profile_machine(None, device="cpu", rows=[17], say=said.append, disk_bytes=64 * KIB)
    assert (found.device, found.pinned_copy, found.pageable_copy, found.models) == ("cpu", {}, {65536: 1e9}, ())
    assert [rate.num_threads for rate in found.disk] == [1, 4]
    assert said == [
        "copies from pageable memory (1 of 4)",
        "the disk: writing a scratch file (2 of 4)",
        "disk reads, 1 at a time (3 of 4)",
        "disk reads, 4 at a time (4 of 4)",
    ]
    assert list(tmp_path.iterdir()) == []


def test_pinning_that_is_refused_leaves_a_profile_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, is_pinned: bool) -> dict[int, float]:
        raise RuntimeError("CUDA error: operation not supported\nmore")

    monkeypatch.setattr(profiling, "measure_copies", refuse)
    said: list[str] = []
    assert profiling._pinned_copies(torch.device("cuda"), said.append) == {}
    assert said == ["pinning is refused (CUDA error: operation not supported); copies go through pageable memory"]


def test_a_device_is_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_there() -> None:
        raise UsageError("No GPU.")

    monkeypatch.setattr(profiling, "require_gpu", none_there)
    assert (choose_device("auto"), choose_device("cpu")) == ("cpu", "cpu")
    with pytest.raises(UsageError, match="No GPU"):
        choose_device("cuda")
    with pytest.raises(UsageError, match="Unknown device 'tpu'"):
        choose_device("tpu")
    monkeypatch.setattr(profiling, "require_gpu", lambda: None)
    assert choose_device("auto") == "cuda"
