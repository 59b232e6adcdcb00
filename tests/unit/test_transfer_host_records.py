"""Records in host memory: filled in order, asked for out of order, never read twice, sharing places that are few."""

from __future__ import annotations

import random
import threading
import zlib

import pytest

from moespeq.errors import StorageError
from moespeq.transfer import HostRecords
from moespeq.types import Cause, ExpertKey
from transfer_fakes import RECORD_BYTES, FakeDisk, FakePinning, eventually, host_records

PAGE_BYTES = 4096


def key(expert: int, layer: int = 0) -> ExpertKey:
    return ExpertKey(layer, expert)


def borrowed(records: HostRecords, expert: int) -> None:
    """Borrow a record, check its bytes and give it back."""
    record = records.borrow(key(expert))
    assert record.shape == (records.num_bytes(key(expert)),)
    assert bool((record == expert).all())
    records.give_back(key(expert))


def crc32_of(expert_key: ExpertKey) -> int:
    return zlib.crc32(bytes([expert_key.expert]) * RECORD_BYTES)


def test_all_records_are_filled_in_layer_order_each_read_once() -> None:
    disk = FakeDisk()
    records = host_records(disk, 5, num_layers=2, num_threads=1)
    assert records.holds_all
    assert not records.fill.is_full
    records.start_filling()
    records.wait_full()
    assert records.fill.is_full
    assert records.fill.filled_bytes == 10 * RECORD_BYTES
    assert disk.order == [ExpertKey(layer, expert) for layer in range(2) for expert in range(5)]
    borrowed(records, 3)
    assert len(disk.order) == 10
    records.close()


def test_a_record_asked_for_during_the_fill_is_read_next_and_not_again() -> None:
    disk = FakeDisk()
    records = host_records(disk, 20, num_threads=1)
    disk.gate.clear()
    records.start_filling()
    eventually(lambda: len(disk.order) == 1)
    answers: list[int] = []
    for urgency, expert in ((Cause.STAGE, 11), (Cause.DEMAND, 15)):
        records.request(key(expert), urgency, lambda record, expert=expert: answers.append(expert))
    disk.gate.set()
    records.wait_full()
    assert [each.expert for each in disk.order[:4]] == [0, 15, 11, 1]
    assert sorted(disk.order) == [key(expert) for expert in range(20)]
    assert answers == [15, 11]
    records.close()


def test_a_record_being_read_by_the_fill_is_waited_for() -> None:
    disk = FakeDisk()
    records = host_records(disk, 3, num_threads=2)
    disk.gate.clear()
    records.start_filling()
    eventually(lambda: len(disk.order) == 2)
    answers: list[ExpertKey] = []
    records.request(key(0), Cause.DEMAND, lambda _: answers.append(key(0)))
    assert not records.withdraw(key(0)), "its reading has begun"
    disk.gate.set()
    records.wait_full()
    eventually(lambda: answers == [key(0)])
    assert len(disk.order) == 3
    records.close()


def test_of_two_readers_that_took_the_same_record_only_one_reads_it() -> None:
    records = host_records(FakeDisk(), 3)
    assert records._claim(key(1)) is not None
    assert records._claim(key(1)) is None, "asked for between the first reader's take and its claim"
    records.close()


def test_a_withdrawn_request_goes_back_to_its_turn_in_the_fill() -> None:
    disk = FakeDisk()
    records = host_records(disk, 6, num_threads=1)
    disk.gate.clear()
    records.start_filling()
    eventually(lambda: len(disk.order) == 1)
    records.request(key(4), Cause.DEMAND, lambda _: pytest.fail("withdrawn"))
    assert records.withdraw(key(4))
    assert not records.withdraw(key(4))
    disk.gate.set()
    records.wait_full()
    assert sorted(disk.order) == [key(expert) for expert in range(6)]
    records.close()


def test_a_fill_that_fails_in_the_middle_fills_the_rest_and_says_so() -> None:
    disk = FakeDisk()
    disk.errors[key(2)] = StorageError("The disk is gone; plug it in.")
    disk.errors[key(3)] = OSError(5, "Input/output error")
    records = host_records(disk, 6)
    records.start_filling()
    with pytest.raises(StorageError, match="plug it in"):
        records.wait_full()
    assert not records.fill.is_full
    assert records.fill.filled_bytes == 4 * RECORD_BYTES
    with pytest.raises(StorageError, match="Expert 3 of MoE layer 0 could not be read"):
        records.borrow(key(3))
    disk.errors.clear()
    borrowed(records, 2)
    borrowed(records, 3)
    assert records.fill.is_full
    records.wait_full()
    records.close()


def test_records_land_on_pages_and_no_pinned_piece_ends_inside_one() -> None:
    disk, pinning = FakeDisk(record_bytes=70_001), FakePinning()
    keys = [key(expert) for expert in range(4000)]
    records = HostRecords(disk, keys, budget_bytes=1 << 30, pinning=pinning, warn=pytest.fail)
    eventually(lambda: records.counters().pinned_bytes == records.counters().arena_bytes)
    assert len(pinning.ranges) == 3
    assert sum(pinning.ranges.values()) == records.counters().arena_bytes == 4000 * 73_728
    for expert in (0, 1, 1819, 1820, 1821, 3999):
        record = records.borrow(keys[expert])
        begin, end = record.data_ptr(), record.data_ptr() + record.numel()
        assert begin % 4096 == 0
        assert any(address <= begin and end <= address + size for address, size in pinning.ranges.items())
        assert records.is_pinned(record)
    records.close()
    assert not pinning.ranges


def test_a_refusal_leaves_what_was_pinned_before_it_and_warns_once() -> None:
    disk, pinning = FakeDisk(record_bytes=64 << 20), FakePinning(num_allowed=1)
    warnings: list[str] = []
    records = HostRecords(
        disk, [key(expert) for expert in range(6)], budget_bytes=1 << 30, pinning=pinning, warn=warnings.append
    )
    eventually(lambda: bool(warnings))
    assert warnings == [
        "The driver refused to pin host memory beyond 128.00 MiB of 384.00 MiB (out of memory); copies of the rest go "
        "through a small buffer, at about 8 instead of 55 GB/s on a PCIe 5 link."
    ]
    assert [records.is_pinned(records.borrow(key(expert))) for expert in (1, 2)] == [True, False]
    records.close()


def test_records_are_read_while_the_arena_is_still_being_pinned() -> None:
    disk, pinning = FakeDisk(), FakePinning()
    pinning.gate.clear()
    records = HostRecords(disk, [key(0)], budget_bytes=1 << 20, pinning=pinning, warn=pytest.fail)
    record = records.borrow(key(0))
    assert not records.is_pinned(record)
    pinning.gate.set()
    eventually(lambda: records.is_pinned(record))
    records.close()


def test_with_less_memory_the_often_read_stay() -> None:
    disk = FakeDisk(PAGE_BYTES)
    records = host_records(disk, 8, num_places=4, num_threads=1)
    assert not records.holds_all
    records.start_filling()
    for _ in range(4):
        for expert in (0, 1):
            borrowed(records, expert)
    for expert in range(2, 8):
        borrowed(records, expert)
    num_reads = len(disk.order)
    for expert in (0, 1):
        borrowed(records, expert)
    assert len(disk.order) == num_reads == 8
    assert records.counters().held_bytes == 2 * PAGE_BYTES
    records.close()


def test_a_record_read_more_often_takes_the_place_of_a_colder_one_not_leased() -> None:
    disk = FakeDisk(PAGE_BYTES)
    records = host_records(disk, 8, num_places=2, num_threads=1)  # one stays, one is on its way
    borrowed(records, 1)
    held = records.borrow(key(1))
    for _ in range(3):
        borrowed(records, 0)
    assert bool((held == 1).all()), "leased: not evicted"
    records.give_back(key(1))
    borrowed(records, 0)
    num_reads = len(disk.order)
    borrowed(records, 0)
    assert len(disk.order) == num_reads, "0 took the place of 1"
    records.close()


def test_a_read_waits_for_a_place_that_is_lent_out() -> None:
    disk = FakeDisk(PAGE_BYTES)
    records = host_records(disk, 8, num_places=1)
    records.borrow(key(3))
    answers: list[ExpertKey] = []
    records.request(key(4), Cause.DEMAND, lambda _: answers.append(key(4)))
    assert disk.order == [key(3)]
    records.give_back(key(3))
    eventually(lambda: answers == [key(4)])
    records.close()


@pytest.mark.parametrize("num_places", [1, 3, 9, None])
def test_random_borrows_from_many_threads_always_see_the_right_bytes(num_places: int | None) -> None:
    disk = FakeDisk(PAGE_BYTES)
    records = host_records(disk, 12, num_layers=3, num_places=num_places, num_threads=3)
    records.start_filling()
    failures: list[BaseException] = []

    def work(layer: int) -> None:
        rng = random.Random(layer)
        try:
            for _ in range(150):
                expert = min(rng.randrange(12), rng.randrange(12))
                record = records.borrow(key(expert, layer))
                assert bool((record == expert).all())
                records.give_back(key(expert, layer))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    counters = records.counters()
    assert counters.disk_reads == len(disk.order)
    assert counters.disk_bytes == len(disk.order) * PAGE_BYTES
    if num_places is None:
        assert len(disk.order) == 36, "no record was read twice"
    records.close()


def test_a_sample_read_back_matches_the_store_and_a_damaged_record_is_named() -> None:
    records = host_records(FakeDisk(), 6)
    records.start_filling()
    records.wait_full()
    assert records.verify_sample(4, crc32_of) == 4
    assert records.verify_sample(100, crc32_of) == 6
    records.borrow(key(3))[5] = 0
    with pytest.raises(StorageError, match="Expert 3 of MoE layer 0 is damaged in host memory: its 64 bytes do not"):
        records.verify_sample(6, crc32_of)
    records.close()


def test_closing_in_the_middle_of_a_fill_ends_after_the_reads_that_run() -> None:
    disk, pinning = FakeDisk(), FakePinning()
    disk.gate.clear()
    keys = [key(expert) for expert in range(50)]
    records = HostRecords(disk, keys, budget_bytes=1 << 20, pinning=pinning, warn=pytest.fail, num_threads=2)
    records.start_filling()
    eventually(lambda: len(disk.order) == 2)
    disk.gate.set()
    disk.held = {each: threading.Event() for each in keys[4:]}
    eventually(lambda: len(disk.order) >= 5)
    closer = threading.Thread(target=records.close)
    closer.start()
    for event in disk.held.values():
        event.set()
    closer.join(timeout=10)
    assert len(disk.order) < 50
    assert not pinning.ranges
    assert not any(thread.name.startswith("moespeq") for thread in threading.enumerate())
