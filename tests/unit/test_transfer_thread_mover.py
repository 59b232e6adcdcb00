"""The thread mover: what it delivers, in which order, and how failures reach the engine thread."""

from __future__ import annotations

import threading

import pytest

from moespeq.errors import StoreError
from moespeq.ports import Clock, Mover, RecordSource
from moespeq.transfer import MonotonicClock, SlotArena, ThreadMover
from moespeq.types import Cause, Completion, ExpertKey, Fetch
from transfer_fakes import eventually

RECORD_BYTES = 64


class FakeSource:
    """Records filled with their expert's id; reads wait for `gate`, and fail for keys in `errors`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.errors: dict[ExpertKey, Exception] = {}
        self.order: list[ExpertKey] = []

    def num_bytes(self, key: ExpertKey) -> int:
        return RECORD_BYTES

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        assert self.gate.wait(timeout=10)
        self.order.append(key)
        if key in self.errors:
            raise self.errors[key]
        buffer[:RECORD_BYTES] = bytes([key.expert]) * RECORD_BYTES


class Rig:
    def __init__(self, num_threads: int = 2) -> None:
        self.source = FakeSource()
        self.arena = SlotArena(num_slots=8, slot_bytes=RECORD_BYTES)
        self.mover = ThreadMover(self.source, self.arena.slots(), num_threads=num_threads, clock=MonotonicClock())

    def submit(self, expert: int, slot: int, cause: Cause = Cause.DEMAND) -> Fetch:
        fetch = Fetch(ExpertKey(0, expert), slot, RECORD_BYTES, cause)
        self.mover.submit(fetch)
        return fetch

    def wait_for(self, num_fetches: int) -> list[Completion]:
        done: list[Completion] = []
        while len(done) < num_fetches:
            done.extend(self.mover.wait())
        return done


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_parts_are_what_residency_expects(rig: Rig) -> None:
    assert isinstance(rig.mover, Mover)
    assert isinstance(rig.source, RecordSource)
    assert isinstance(MonotonicClock(), Clock)
    rig.mover.close()


def test_every_record_lands_in_its_own_slot(rig: Rig) -> None:
    for expert in range(8):
        rig.submit(expert, slot=7 - expert)
    done = rig.wait_for(8)
    assert sorted(completion.fetch.key.expert for completion in done) == list(range(8))
    assert all(completion.error is None and completion.seconds >= 0 for completion in done)
    for expert in range(8):
        assert bytes(rig.arena.slot(7 - expert)[:RECORD_BYTES]) == bytes([expert]) * RECORD_BYTES
    rig.mover.close()


def test_poll_never_blocks_and_wait_returns_nothing_when_nothing_is_in_flight(rig: Rig) -> None:
    assert rig.mover.wait() == []
    rig.source.gate.clear()
    rig.submit(1, slot=0)
    assert rig.mover.poll() == []
    rig.source.gate.set()
    assert [completion.fetch.slot for completion in rig.mover.wait()] == [0]
    assert rig.mover.wait() == []
    rig.mover.close()


def test_one_worker_keeps_the_order_of_submission() -> None:
    rig = Rig(num_threads=1)
    rig.source.gate.clear()
    for expert in (3, 1, 2):
        rig.submit(expert, slot=expert)
    rig.source.gate.set()
    assert [completion.fetch.key.expert for completion in rig.wait_for(3)] == [3, 1, 2]
    rig.mover.close()


def test_the_most_urgent_is_read_first() -> None:
    rig = Rig(num_threads=1)
    rig.source.gate.clear()
    rig.submit(0, 0, Cause.PRIME)
    eventually(lambda: len(rig.mover._fetches) == 0)
    for expert, cause in ((1, Cause.PRIME), (2, Cause.STAGE), (3, Cause.DEMAND), (4, Cause.STAGE)):
        rig.submit(expert, expert, cause)
    rig.source.gate.set()
    assert [completion.fetch.key.expert for completion in rig.wait_for(5)] == [0, 3, 2, 4, 1]
    rig.mover.close()


def test_a_fetch_taken_back_is_never_read_and_one_that_began_is_not_taken_back() -> None:
    rig = Rig(num_threads=1)
    rig.source.gate.clear()
    begun = rig.submit(0, 0)
    eventually(lambda: len(rig.mover._fetches) == 0)
    guess = rig.submit(1, 1, Cause.PREFETCH)
    assert rig.mover.cancel(guess)
    assert not rig.mover.cancel(guess)
    assert not rig.mover.cancel(begun)
    rig.source.gate.set()
    assert [completion.fetch for completion in rig.wait_for(1)] == [begun]
    assert rig.mover.wait() == []
    assert rig.source.order == [begun.key]
    rig.mover.close()


def test_moves_are_the_reads_that_succeeded() -> None:
    rig = Rig(num_threads=1)
    rig.source.errors[ExpertKey(0, 1)] = OSError(5, "Input/output error")
    for expert in range(3):
        rig.submit(expert, expert)
    done = rig.wait_for(3)
    moves = rig.mover.take_moves()
    assert [move.num_bytes for move in moves] == [RECORD_BYTES] * 2
    assert [move.end_s - move.begin_s for move in moves] == [done[0].seconds, done[2].seconds]
    assert rig.mover.take_moves() == []
    rig.mover.close()


def test_expected_failure_is_a_sentence_in_its_completion(rig: Rig) -> None:
    rig.source.errors[ExpertKey(0, 1)] = StoreError("Record 1 is damaged; prepare the store again.")
    rig.source.errors[ExpertKey(0, 2)] = OSError(5, "Input/output error")
    for expert in (1, 2, 3):
        rig.submit(expert, slot=expert)
    errors = {completion.fetch.key.expert: completion.error for completion in rig.wait_for(3)}
    assert errors[1] == "Record 1 is damaged; prepare the store again."
    assert errors[2] is not None
    assert errors[2].startswith("Expert 2 of MoE layer 0 could not be read")
    assert errors[3] is None
    rig.mover.close()


def test_our_bug_in_a_worker_comes_with_the_completion_of_its_fetch(rig: Rig) -> None:
    rig.source.errors[ExpertKey(0, 1)] = ZeroDivisionError("bug")
    rig.submit(1, slot=0)
    (done,) = rig.wait_for(1)
    assert (done.fetch.slot, type(done.bug)) == (0, ZeroDivisionError)
    rig.submit(2, slot=0)
    assert [completion.error for completion in rig.wait_for(1)] == [None]
    rig.mover.close()


def test_close_finishes_what_is_in_flight_and_may_be_called_twice(rig: Rig) -> None:
    for expert in range(4):
        rig.submit(expert, slot=expert)
    rig.mover.close()
    rig.mover.close()
    assert len(rig.source.order) == 4
    assert len(rig.mover.poll()) == 4
    assert not any(thread.name.startswith("moespeq-mover") for thread in threading.enumerate())


def test_record_larger_than_its_slot_is_our_bug(rig: Rig) -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        rig.mover.submit(Fetch(ExpertKey(0, 0), 0, rig.arena.stride_bytes + 1, Cause.DEMAND))
    rig.mover.close()
