"""Aligned slots, and a link slowed down to a chosen bandwidth."""

from __future__ import annotations

import ctypes
import gc

import pytest

from moespeq.errors import BudgetError
from moespeq.transfer import PacedSource, SlotArena, slot_stride_bytes
from moespeq.types import ExpertKey


@pytest.mark.parametrize(
    ("slot_bytes", "stride_bytes", "alignment_bytes"),
    [(1, 64, 64), (65535, 65536, 64), (65536, 65536, 4096), (65537, 69632, 4096)],
)
def test_slots_start_and_end_on_blocks(slot_bytes: int, stride_bytes: int, alignment_bytes: int) -> None:
    arena = SlotArena(num_slots=3, slot_bytes=slot_bytes)
    assert arena.stride_bytes == slot_stride_bytes(slot_bytes) == stride_bytes
    assert arena.num_bytes == 3 * stride_bytes
    for slot in arena.slots():
        assert len(slot) == stride_bytes
        assert ctypes.addressof(ctypes.c_char.from_buffer(slot)) % alignment_bytes == 0


def test_slots_do_not_overlap_and_lie_in_the_memory_in_order() -> None:
    arena = SlotArena(num_slots=3, slot_bytes=10)
    for index, slot in enumerate(arena.slots()):
        slot[:] = bytes([index + 1]) * len(slot)
    assert [arena.slot(index)[0] for index in range(3)] == [1, 2, 3]
    assert bytes(arena.memory()) == b"".join(bytes([index + 1]) * 64 for index in range(3))


def test_memory_outlives_the_arena_while_a_slot_is_held() -> None:
    slot = SlotArena(num_slots=1, slot_bytes=10).slot(0)
    gc.collect()
    slot[:3] = b"abc"
    assert bytes(slot[:3]) == b"abc"


def test_refused_memory_says_how_much_was_asked_for() -> None:
    with pytest.raises(BudgetError, match=r"1024 expert slots need 1073741824\.00 GiB of host memory"):
        SlotArena(num_slots=1024, slot_bytes=2**50)


class FakeTime:
    """A clock and a sleep that agree; reading takes `read_s`."""

    def __init__(self, read_s: float = 0.0) -> None:
        self.time_s = 100.0
        self.read_s = read_s

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def num_bytes(self, key: ExpertKey) -> int:
        return 50

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        self.time_s += self.read_s
        buffer[:1] = b"x"


def paced(time: FakeTime) -> PacedSource:
    return PacedSource(time, bytes_per_s=100.0, clock=time, sleep=time.sleep)


def test_what_is_skipped_takes_no_time() -> None:
    time = FakeTime()
    paced(time).read_into(ExpertKey(0, 0), memoryview(bytearray(50)), skip_bytes=20)
    assert time.time_s == pytest.approx(100.0 + 0.3)


def test_paced_reads_take_as_long_as_the_link_would() -> None:
    time = FakeTime(read_s=0.1)
    source, buffer = paced(time), memoryview(bytearray(50))
    for _ in range(4):
        source.read_into(ExpertKey(0, 0), buffer)
    assert time.time_s == pytest.approx(100.0 + 4 * 0.5)
    assert buffer[0] == ord("x")
    assert source.num_bytes(ExpertKey(0, 0)) == 50


def test_pacing_adds_nothing_to_a_slower_source() -> None:
    time = FakeTime(read_s=0.7)
    source = paced(time)
    for _ in range(3):
        source.read_into(ExpertKey(0, 0), memoryview(bytearray(50)))
    assert time.time_s == pytest.approx(100.0 + 3 * 0.7)


def test_an_idle_link_does_not_save_up_bandwidth() -> None:
    time = FakeTime()
    source = paced(time)
    time.sleep(60.0)
    source.read_into(ExpertKey(0, 0), memoryview(bytearray(50)))
    assert time.time_s == pytest.approx(160.5)


def test_a_pace_can_be_changed_and_lifted() -> None:
    time = FakeTime()
    source, buffer = paced(time), memoryview(bytearray(50))
    for bytes_per_s, end_s in ((50.0, 101.0), (None, 101.0), (100.0, 101.5)):
        source.pace(bytes_per_s)
        source.read_into(ExpertKey(0, 0), buffer)
        assert time.time_s == pytest.approx(end_s)
