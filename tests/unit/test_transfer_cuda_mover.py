"""The CUDA mover on a fake device: order, fences, taking back, pacing, failures, and what is left after them."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from moespeq.errors import StoreError
from moespeq.ports import Mover
from moespeq.transfer import CopyStream, CudaMover, HostRecords, MonotonicClock
from moespeq.transfer.link_times import LinkTimes
from moespeq.types import Cause, Completion, ExpertKey, Fetch
from transfer_fakes import RECORD_BYTES, FakeDevice, FakeDisk, FakePinning, eventually, host_records

NUM_EXPERTS = 40


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def sleep_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)


class Rig:
    """A mover over a full host and a device whose copies end when told to."""

    def __init__(self, *, is_free: bool = True, is_full: bool = True, least_begun: int = 3) -> None:
        self.disk = FakeDisk()
        self.records = host_records(self.disk, NUM_EXPERTS)
        self.device = FakeDevice(is_free=is_free)
        self.mover = CudaMover(self.records, self.device, clock=MonotonicClock(), least_begun=least_begun)
        if is_full:
            self.records.start_filling()
            self.records.wait_full()

    def submit(self, expert: int, slot: int, cause: Cause = Cause.DEMAND) -> Fetch:
        fetch = Fetch(ExpertKey(0, expert), slot, RECORD_BYTES, cause)
        self.mover.submit(fetch)
        return fetch

    def wait_for(self, num_fetches: int) -> list[Completion]:
        done: list[Completion] = []
        while len(done) < num_fetches:
            done.extend(self.mover.wait())
        return done

    def holds(self, slot: int, expert: int) -> bool:
        return bool((self.device.slots[slot] == expert).all())

    def close(self) -> None:
        self.device.let(1000)
        self.mover.close()
        self.records.close()


def test_parts_are_what_they_are_taken_for() -> None:
    rig = Rig()
    stream: CopyStream = rig.device
    assert stream.num_slots == 8
    assert isinstance(rig.mover, Mover)
    rig.close()


def test_every_record_lands_in_its_own_slot() -> None:
    rig = Rig()
    for expert in range(8):
        rig.submit(expert, slot=7 - expert)
    done = rig.wait_for(8)
    assert sorted(completion.fetch.key.expert for completion in done) == list(range(8))
    assert all(completion.error is None and completion.seconds == rig.device.seconds for completion in done)
    assert all(rig.holds(7 - expert, expert) for expert in range(8))
    assert rig.mover.wait() == []
    rig.close()


def test_of_a_record_whose_base_is_there_only_the_end_is_copied() -> None:
    rig = Rig()
    key, tail_bytes = ExpertKey(0, 3), RECORD_BYTES - 24
    rig.mover.submit(Fetch(key, 2, tail_bytes, Cause.DEMAND))
    (done,) = rig.wait_for(1)
    (copied,) = rig.device.sources
    assert done.error is None
    assert (copied.numel(), copied.data_ptr()) == (tail_bytes, rig.records.borrow(key).data_ptr() + 24)
    assert rig.holds(2, 3) is False
    assert rig.mover.take_moves()[0].num_bytes == tail_bytes
    rig.close()


def test_a_demand_overtakes_every_guess_that_has_not_begun() -> None:
    rig = Rig(is_free=False, least_begun=2)
    causes = [Cause.PRIME, Cause.PRIME, Cause.PRIME, Cause.PREFETCH, Cause.STAGE, Cause.PREFETCH, Cause.DEMAND]
    for slot, cause in enumerate(causes):
        rig.submit(slot, slot, cause)
        if slot < 2:
            eventually(lambda num_begun=slot + 1: len(rig.device.begun) == num_begun)
    rig.device.let(1000)
    rig.wait_for(len(causes))
    assert [slot for slot, _ in rig.device.begun] == [0, 1, 6, 4, 3, 5, 2]
    rig.close()


def test_three_copies_are_begun_and_no_more() -> None:
    rig = Rig(is_free=False, least_begun=3)
    for slot in range(8):
        rig.submit(slot, slot)
    eventually(lambda: len(rig.device.begun) == 3)
    for num_ended in range(1, 6):
        rig.device.let(1)
        rig.wait_for(1)
        eventually(lambda num_begun=3 + num_ended: len(rig.device.begun) == num_begun)
    rig.close()


def test_as_many_bytes_as_asked_for_are_begun_ahead_and_the_next_fetch_is_overtaken() -> None:
    rig = Rig(is_free=False, least_begun=1)
    rig.mover.begin_ahead(4 * RECORD_BYTES)
    for slot in range(6):
        rig.submit(slot, slot, Cause.STAGE)
    eventually(lambda: len(rig.device.begun) == 4)
    rig.mover.begin_ahead(0)
    rig.submit(6, 6, Cause.DEMAND)
    rig.device.let(1000)
    rig.wait_for(7)
    assert [slot for slot, _ in rig.device.begun] == [0, 1, 2, 3, 6, 4, 5]
    rig.close()


def test_a_fetch_taken_back_never_runs_and_its_slot_is_free_at_once() -> None:
    rig = Rig(is_free=False, least_begun=1)
    rig.submit(1, 0)
    eventually(lambda: len(rig.device.begun) == 1)
    guess = rig.submit(2, 1, Cause.PREFETCH)
    assert rig.mover.cancel(guess)
    assert not rig.mover.cancel(guess)
    rig.submit(3, 1)
    rig.device.let(1000)
    assert [completion.fetch.key.expert for completion in rig.wait_for(2)] == [1, 3]
    assert rig.holds(1, 3)
    assert rig.mover.wait() == []
    rig.close()


def test_a_fetch_taken_back_from_the_links_queue_gives_its_place_in_host_memory_back() -> None:
    records, device = host_records(FakeDisk(4096), 8, num_places=2), FakeDevice(slot_bytes=4096, is_free=False)
    mover = CudaMover(records, device, clock=MonotonicClock(), least_begun=1)
    first, second, third = (Fetch(ExpertKey(0, expert), expert, 4096, Cause.STAGE) for expert in range(3))
    mover.submit(first)
    eventually(lambda: len(device.begun) == 1)
    mover.submit(second)
    eventually(lambda: len(mover._link) == 1)
    assert mover.cancel(second)
    mover.submit(third)
    eventually(lambda: len(mover._link) == 1)
    device.let(2)
    assert [completion.fetch for _ in range(2) for completion in mover.wait()] == [first, third]
    mover.close()
    records.close()


def test_a_copy_that_has_begun_or_ended_is_not_taken_back() -> None:
    rig = Rig(is_free=False)
    begun = rig.submit(1, 0)
    eventually(lambda: len(rig.device.begun) == 1)
    assert not rig.mover.cancel(begun)
    rig.device.let(1)
    assert [completion.fetch for completion in rig.wait_for(1)] == [begun]
    assert not rig.mover.cancel(begun)
    rig.close()


def test_the_device_waits_for_copies_that_have_begun_and_for_no_other() -> None:
    rig = Rig(is_free=False, least_begun=2)
    fetches = [rig.submit(expert, slot=expert) for expert in range(3)]
    assert [rig.mover.wait_on_device(fetch) for fetch in fetches] == [True, True, False]
    assert rig.device.waited_for == [0, 1]
    rig.mover.pace(1e9)
    assert not rig.mover.wait_on_device(fetches[0])  # it ends before a paced link reports it
    rig.close()


def test_a_fetch_that_waits_for_the_disk_can_be_taken_back_and_asked_for_again() -> None:
    rig = Rig(is_full=False)
    rig.disk.gate.clear()
    for slot in range(2):
        rig.submit(slot, slot)  # both readers are busy now
    eventually(lambda: len(rig.disk.order) == 2)
    guess = rig.submit(2, 2, Cause.PREFETCH)
    assert rig.mover.cancel(guess)
    assert not rig.mover.cancel(Fetch(ExpertKey(0, 0), 0, RECORD_BYTES, Cause.DEMAND)), "its reading has begun"
    rig.submit(2, 3)
    rig.disk.gate.set()
    assert {completion.fetch.slot for completion in rig.wait_for(3)} == {0, 1, 3}
    rig.close()


def test_a_record_on_the_disk_never_holds_up_one_in_host_memory() -> None:
    rig = Rig(is_full=False)
    rig.records.borrow(ExpertKey(0, 5))
    rig.disk.gate.clear()
    rig.submit(1, 0)
    rig.submit(5, 1, Cause.PRIME)
    assert [completion.fetch.slot for completion in rig.wait_for(1)] == [1]
    rig.disk.gate.set()
    rig.wait_for(1)
    rig.close()


def test_a_copy_waits_for_the_last_fence_of_its_own_slot_only() -> None:
    rig = Rig(least_begun=1)
    rig.mover.fence([0, 1])
    rig.mover.fence([1])
    for slot in range(3):
        rig.submit(slot, slot)
        rig.wait_for(1)
    rig.mover.fence([0])
    assert rig.device.begun == [(0, 1), (1, 2), (2, None)]
    rig.submit(3, 0)
    rig.wait_for(1)
    assert rig.device.begun[-1] == (0, 3)
    rig.close()


def test_a_fence_set_after_the_submit_does_not_delay_the_copy() -> None:
    rig = Rig(is_free=False, least_begun=1)
    rig.submit(1, 0)
    rig.submit(2, 1)
    rig.mover.fence([1])
    rig.device.let(2)
    rig.wait_for(2)
    assert rig.device.begun == [(0, None), (1, None)]
    rig.close()


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate"), RuntimeError("CUDA error: x\nmore")]
)
@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_copy_the_driver_refuses_is_a_sentence_and_the_next_one_works(when: str, error: Exception) -> None:
    rig = Rig()
    errors = rig.device.begin_errors if when == "begin" else rig.device.end_errors
    errors[0] = error
    failed = rig.submit(4, 0)
    (completion,) = rig.wait_for(1)
    assert completion.fetch == failed
    assert completion.error is not None
    assert completion.error.startswith("Expert 4 of MoE layer 0 could not be copied to the GPU (CUDA")
    assert "more" not in completion.error
    errors.clear()
    for _ in range(4):
        rig.submit(4, 0)
        assert rig.wait_for(1)[0].error is None
    assert rig.holds(0, 4)
    rig.close()


def test_a_failing_source_is_a_sentence_and_our_bug_goes_along() -> None:
    rig = Rig(is_full=False)
    rig.disk.errors[ExpertKey(0, 1)] = StoreError("Record 1 is damaged; prepare the store again.")
    rig.disk.errors[ExpertKey(0, 2)] = OSError(5, "Input/output error")
    rig.disk.errors[ExpertKey(0, 3)] = ZeroDivisionError("bug")
    rig.submit(1, 1)
    rig.submit(2, 2)
    errors = {completion.fetch.slot: completion.error for completion in rig.wait_for(2)}
    assert errors[1] == "Record 1 is damaged; prepare the store again."
    assert errors[2] is not None
    assert errors[2].startswith("Expert 2 of MoE layer 0 could not be read")
    rig.submit(3, 3)
    (done,) = rig.wait_for(1)
    assert (done.fetch.slot, type(done.bug)) == (3, ZeroDivisionError)  # its slot comes back all the same
    rig.device.begin_errors[0] = TypeError("ours")
    rig.submit(4, 0)
    (done,) = rig.wait_for(1)
    assert (done.fetch.slot, type(done.bug)) == (0, TypeError)
    rig.submit(5, 5)
    assert rig.wait_for(1)[0].error is None
    rig.close()


def test_an_interrupt_while_waiting_leaves_the_mover_usable() -> None:
    rig = Rig(is_free=False)
    rig.submit(1, 0)
    eventually(lambda: len(rig.device.begun) == 1)
    main_thread = threading.get_ident()
    threading.Timer(0.05, lambda: signal.pthread_kill(main_thread, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        rig.mover.wait()
    rig.device.let(1)
    assert [completion.fetch.slot for completion in rig.wait_for(1)] == [0]
    rig.device.let(1)
    rig.submit(2, 1)
    assert [completion.fetch.slot for completion in rig.wait_for(1)] == [1]
    rig.close()


def test_close_ends_what_has_begun_drops_the_rest_and_may_be_called_twice() -> None:
    rig = Rig(is_free=False, least_begun=2, is_full=False)
    for slot in range(2):
        rig.submit(slot, slot)
    eventually(lambda: len(rig.device.begun) == 2)
    rig.submit(2, 2)  # waits for the link
    eventually(lambda: len(rig.mover._link) == 1)
    rig.disk.gate.clear()
    for slot in range(3, 7):
        rig.submit(slot, slot)  # two are being read, two wait for a reader
    closer = threading.Thread(target=rig.mover.close)
    closer.start()
    closer.join(timeout=0.05)
    assert closer.is_alive(), "two copies have begun"
    rig.device.let(2)
    closer.join(timeout=10)
    rig.mover.close()
    rig.disk.gate.set()
    rig.records.close()
    assert len(rig.device.begun) == 2
    assert not any(thread.name.startswith("moespeq") for thread in threading.enumerate())


def test_unpinned_records_go_through_a_buffer_that_no_begun_copy_still_uses() -> None:
    disk, pinning, device = FakeDisk(), FakePinning(num_allowed=0), FakeDevice(is_free=False)
    warnings: list[str] = []
    keys = [ExpertKey(0, expert) for expert in range(8)]
    records = HostRecords(disk, keys, budget_bytes=1 << 20, pinning=pinning, warn=warnings.append)
    mover = CudaMover(records, device, clock=MonotonicClock(), least_begun=2)
    for slot in range(8):
        mover.submit(Fetch(keys[slot], slot, RECORD_BYTES, Cause.DEMAND))
    for num_ended in range(8):
        eventually(lambda num_ended=num_ended: len(device.begun) == min(8, num_ended + 2))
        device.let(1)
        mover.wait()
    assert all(bool((device.slots[slot] == keys[slot].expert).all()) for slot in range(8))
    assert len({source.data_ptr() for source in device.sources}) == 2
    (warning,) = warnings
    assert "refused to pin host memory beyond 0 B of 4.00 KiB (out of memory)" in warning
    mover.close()
    records.close()


def paced(bytes_per_s: float) -> tuple[CudaMover, FakeDevice, FakeTime, HostRecords]:
    """A paced mover over records that are there, on a clock that only pacing moves."""
    records, device, time = host_records(FakeDisk(), 8), FakeDevice(is_free=False), FakeTime()
    records.start_filling()
    records.wait_full()
    device.seconds = 0.01
    mover = CudaMover(records, device, clock=time, bytes_per_s=bytes_per_s, sleep_until=time.sleep_until)
    return mover, device, time, records


def test_a_paced_link_carries_one_copy_at_a_time_at_its_rate() -> None:
    mover, device, time, records = paced(bytes_per_s=RECORD_BYTES * 10)
    for slot in range(4):
        mover.submit(Fetch(ExpertKey(0, slot), slot, RECORD_BYTES, Cause.DEMAND))
    for num_ended in range(4):
        eventually(lambda num_begun=num_ended + 1: len(device.begun) == num_begun)
        device.let(1)
        (completion,) = mover.wait()
        assert completion.seconds == pytest.approx(0.1)
        assert time.time_s == pytest.approx(100.0 + 0.1 * (num_ended + 1)), "reported when its interval ends"
    moves = mover.take_moves()
    assert [move.begin_s for move in moves] == pytest.approx([100.0, 100.1, 100.2, 100.3])
    assert [move.end_s for move in moves] == pytest.approx([100.1, 100.2, 100.3, 100.4])
    assert {move.num_bytes for move in moves} == {RECORD_BYTES}
    assert mover.take_moves() == []
    mover.close()
    records.close()


def test_pacing_adds_nothing_to_a_slower_link_and_an_idle_one_saves_nothing_up() -> None:
    mover, device, time, records = paced(bytes_per_s=RECORD_BYTES * 10)

    def carry(slot: int) -> None:
        mover.submit(Fetch(ExpertKey(0, slot), slot, RECORD_BYTES, Cause.DEMAND))
        device.let(1)
        mover.wait()

    device.seconds = 0.3
    time.time_s = 100.3
    carry(0)
    assert time.time_s == pytest.approx(100.4)
    time.time_s += 60.0
    device.seconds = 0.01
    carry(1)
    assert time.time_s == pytest.approx(160.5)
    first, second = mover.take_moves()
    assert first == (pytest.approx(100.3), pytest.approx(100.6), RECORD_BYTES)
    assert second == (pytest.approx(160.4), pytest.approx(160.5), RECORD_BYTES)
    mover.close()
    records.close()


def test_a_link_is_let_go_and_slowed_down_again() -> None:
    mover, device, time, records = paced(bytes_per_s=RECORD_BYTES * 10)
    mover.pace(None)
    device.seconds = 0.0
    for slot in range(4):
        mover.submit(Fetch(ExpertKey(0, slot), slot, RECORD_BYTES, Cause.DEMAND))
    eventually(lambda: len(device.begun) == 3)
    device.let(4)
    while mover.wait():
        pass
    assert time.time_s == 100.0
    for _ in range(2):
        mover.pace(RECORD_BYTES * 10)
    for slot in range(2):
        mover.submit(Fetch(ExpertKey(0, slot), slot, RECORD_BYTES, Cause.DEMAND))
    eventually(lambda: len(device.begun) == 5)
    device.let(1)
    mover.wait()
    assert time.time_s == pytest.approx(100.1)
    device.let(1)
    mover.wait()
    assert time.time_s == pytest.approx(100.2)
    mover.close()
    records.close()


def test_the_link_is_busy_as_long_as_the_device_measured() -> None:
    rig = Rig()
    for slot in range(4):
        rig.submit(slot, slot)
    rig.wait_for(4)
    assert all(move.end_s - move.begin_s == pytest.approx(rig.device.seconds) for move in rig.mover.take_moves())
    rig.close()


def test_spans_of_copies_found_ended_together_follow_each_other_and_never_overlap() -> None:
    times = LinkTimes()
    spans = [(move.begin_s, move.end_s) for move in times.ended([(1, 0.2, None), (1, 0.3, None)], now_s=10.0)]
    spans += [(move.begin_s, move.end_s) for move in times.ended([(1, 0.4, None)], now_s=10.1)]
    spans += [(move.begin_s, move.end_s) for move in times.ended([(1, 0.5, None)], now_s=20.0)]
    assert spans == [pytest.approx(span) for span in ((9.5, 9.7), (9.7, 10.0), (10.0, 10.4), (19.5, 20.0))]


def test_a_record_larger_than_its_slot_is_our_bug() -> None:
    rig = Rig()
    with pytest.raises(AssertionError, match="does not fit"):
        rig.mover.submit(Fetch(ExpertKey(0, 0), 0, RECORD_BYTES + 1, Cause.DEMAND))
    rig.close()
