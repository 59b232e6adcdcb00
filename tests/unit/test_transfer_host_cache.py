"""The host cache: exact budget, frequency instead of recency, one read at a time, the right bytes always."""

from __future__ import annotations

import random
import threading

import pytest

from moespeq.errors import StorageError
from moespeq.transfer import HostCache
from moespeq.types import ExpertKey


class FakeDisk:
    """Records of 10 + expert bytes, filled with the expert's id; counts reads and overlapping reads of one
    key.
    """

    def __init__(self) -> None:
        self.reads: list[ExpertKey] = []
        self.is_broken = False
        self.reading: set[ExpertKey] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.has_started = threading.Event()

    def num_bytes(self, key: ExpertKey) -> int:
        return 10 + key.expert

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        assert key not in self.reading, "read twice at the same time"
        self.reading.add(key)
        self.has_started.set()
        assert self.gate.wait(timeout=10)
        self.reads.append(key)
        self.reading.remove(key)
        if self.is_broken:
            raise StorageError("The disk is gone; plug it in.")
        buffer[: self.num_bytes(key)] = bytes([key.expert]) * self.num_bytes(key)


def read(cache: HostCache, expert: int) -> None:
    buffer = memoryview(bytearray(64))
    cache.read_into(ExpertKey(0, expert), buffer)
    assert bytes(buffer[: 10 + expert]) == bytes([expert]) * (10 + expert)
    assert not any(buffer[10 + expert :]), "wrote past the record"


def test_second_read_comes_from_memory() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=100)
    for _ in range(3):
        read(cache, 1)
    counters = cache.counters()
    assert (counters.hits, counters.disk_reads, counters.disk_bytes, counters.held_bytes) == (2, 1, 11, 11)


def test_a_part_of_a_record_is_cut_from_the_whole_one_which_is_kept() -> None:
    class Counting(FakeDisk):
        def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
            super().read_into(key, buffer)
            buffer[:4] = b"base"

    disk = Counting()
    cache = HostCache(disk, budget_bytes=100)
    for skip_bytes, wanted in ((4, bytes([1] * 7)), (0, b"base" + bytes([1] * 7)), (4, bytes([1] * 7))):
        buffer = bytearray(20)
        cache.read_into(ExpertKey(0, 1), memoryview(buffer), skip_bytes=skip_bytes)
        assert buffer == wanted + bytes(20 - len(wanted))
    assert cache.counters().disk_reads == 1


def test_no_budget_means_every_read_is_a_disk_read() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=0)
    read(cache, 1)
    read(cache, 1)
    assert len(disk.reads) == 2
    assert cache.counters().held_bytes == 0


def test_budget_is_exact_to_the_byte() -> None:
    for budget_bytes, num_held_bytes in ((11 + 12, 23), (11 + 12 - 1, 11)):
        cache = HostCache(FakeDisk(), budget_bytes=budget_bytes)
        read(cache, 1)
        read(cache, 2)
        assert cache.counters().held_bytes == num_held_bytes


def test_cyclic_scan_larger_than_the_budget_still_hits() -> None:
    cache = HostCache(FakeDisk(), budget_bytes=40)
    for _ in range(10):
        for expert in range(5):
            read(cache, expert)
    assert cache.counters().hits >= 9 * 3


def test_record_read_more_often_replaces_one_read_less_often() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=11)
    read(cache, 1)
    read(cache, 0)
    read(cache, 0)
    assert len(disk.reads) == 3
    read(cache, 0)
    assert len(disk.reads) == 3, "expert 0 took the place of expert 1"


def test_large_record_does_not_push_out_what_is_read_as_often() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=21)
    for expert in (0, 0, 1, 15, 15):
        read(cache, expert)
    assert cache.counters().held_bytes == 21
    read(cache, 0)
    read(cache, 1)
    assert len(disk.reads) == 4, "0, 1, 15, 15: neither small record was given up in vain"


def test_favourites_of_the_past_lose_their_place() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=11)
    for _ in range(500):
        read(cache, 1)
    for _ in range(100):
        read(cache, 0)
    assert len(disk.reads) < 60, "without fading, 500 disk reads"


def test_failed_read_is_raised_and_the_next_one_tries_again() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=100)
    disk.is_broken = True
    with pytest.raises(StorageError, match="plug it in"):
        read(cache, 1)
    assert cache.counters().held_bytes == 0
    disk.is_broken = False
    read(cache, 1)
    read(cache, 1)
    assert len(disk.reads) == 2


def test_concurrent_readers_of_one_record_share_one_disk_read() -> None:
    disk = FakeDisk()
    cache = HostCache(disk, budget_bytes=100)
    disk.gate.clear()
    threads = [threading.Thread(target=read, args=(cache, 1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert disk.has_started.wait(timeout=10)
    disk.gate.set()
    for thread in threads:
        thread.join(timeout=10)
    assert disk.reads == [(0, 1)]
    assert cache.counters().hits == 3


@pytest.mark.parametrize("budget_bytes", [0, 25, 60, 1000])
def test_random_reads_from_many_threads_are_right_and_within_budget(budget_bytes: int) -> None:
    cache = HostCache(FakeDisk(), budget_bytes=budget_bytes)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                read(cache, min(rng.randrange(8), rng.randrange(8)))
                assert cache.counters().held_bytes <= budget_bytes
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    counters = cache.counters()
    assert counters.hits + counters.disk_reads == 900
    assert sum(len(data) for data in cache._held.values()) == counters.held_bytes
