"""A profile is measured, written and read back; what cannot be measured is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from moespeq import profiling
from moespeq.errors import StorageError, UsageError
from moespeq.hardware import disk
from moespeq.hardware.disk import measure_reads, scratch_file
from moespeq.hardware.link import measure_copies
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes, default_profile_path
from moespeq.profiling import choose_device, profile_machine

KIB = 1024
PROFILE = MachineProfile(
    device="Some GPU",
    pinned_copy={65536: 2e10, 1 << 20: 5e10},
    pageable_copy={65536: 5e9},
    disk=(DiskRate(1, 1e9, True), DiskRate(4, 2e9, True)),
    model=ModelTimes("some-model", 0.0015, {17: 0.008, 33: 0.01}, 1.5e12),
)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "new" / "profile.json")
    assert MachineProfile.load(tmp_path / "new" / "profile.json") == PROFILE
    assert (PROFILE.link_bytes_per_s, PROFILE.disk_bytes_per_s) == (5e10, 2e9)


def test_without_pinned_copies_the_link_is_what_pageable_ones_reach() -> None:
    assert MachineProfile("cpu", {}, {65536: 3e9}, (DiskRate(1, 1e9, False),)).link_bytes_per_s == 3e9


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"disk": [{"num_threads": 1}]},
        {"pinned_copy": {"big": 1.0}},
        {"more": 1},
        {"device": None, "disk": 3},
    ],
)
def test_anything_unexpected_in_a_profile_is_refused(change: dict[str, object]) -> None:
    text = json.dumps({**json.loads(PROFILE.to_json()), **change})
    with pytest.raises(UsageError, match=r"The profile cannot be read .* run `moespeq profile` again"):
        MachineProfile.from_json(text)
    with pytest.raises(UsageError, match="cannot be read"):
        MachineProfile.from_json("[]")


def test_a_profile_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\); run `moespeq profile`"):
        MachineProfile.load(tmp_path / "none.json")


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


def test_a_scratch_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"), scratch_file(tmp_path / "file", 1):
        pass


def test_the_machine_alone_is_profiled_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    monkeypatch.setattr(profiling, "measure_copies", lambda device, is_pinned: {65536: 1e9})
    said: list[str] = []
    found = profile_machine(None, device="cpu", rows=[17], say=said.append, disk_bytes=64 * KIB)
    assert (found.device, found.pinned_copy, found.pageable_copy, found.model) == ("cpu", {}, {65536: 1e9}, None)
    assert [rate.num_threads for rate in found.disk] == [1, 4]
    assert said == ["copies from pageable memory", "disk reads, 1 at a time", "disk reads, 4 at a time"]
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
