"""The transfer layer on a real device: the claims of the fakes, with the driver's own pinning, streams and refusals."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moespeq.hardware.gpu import require_gpu
from moespeq.hardware.gpu_memory import PeakDeviceMemory
from moespeq.kernels.host_words import copy_from_host
from moespeq.nested import BaseFormat, Layout, encode_base, encode_record, pack_base
from moespeq.transfer import (
    CudaCopyStream,
    CudaMover,
    CudaPinning,
    HostRecords,
    MonotonicClock,
    PlainSource,
    plain_record_bytes,
)
from moespeq.types import Cause, Completion, ExpertKey, Fetch
from transfer_fakes import FakeDisk, eventually

pytestmark = pytest.mark.gpu

RECORD_BYTES = 9 << 20
NUM_EXPERTS = 40
LONG_KERNEL_CYCLES = 400_000_000  # about 0.2 s
warnings: list[str] = []


class Refusing(CudaPinning):
    """A driver that registers no memory."""

    def register(self, address: int, num_bytes: int) -> str | None:
        return "refused by the test"


class Rig:
    """A full host arena and 8 slots."""

    def __init__(self, *, pinning: CudaPinning | None = None, bytes_per_s: float | None = None) -> None:
        keys = [ExpertKey(0, expert) for expert in range(NUM_EXPERTS)]
        warnings.clear()
        self.records = HostRecords(
            FakeDisk(RECORD_BYTES), keys, budget_bytes=1 << 30, pinning=pinning or CudaPinning(), warn=warnings.append
        )
        self.slots = torch.zeros(8, RECORD_BYTES, dtype=torch.uint8, device="cuda")
        self.mover = CudaMover(
            self.records, CudaCopyStream(self.slots), clock=MonotonicClock(), bytes_per_s=bytes_per_s
        )
        self.records.start_filling()
        self.records.wait_full()
        if pinning is None:
            eventually(lambda: self.records.counters().pinned_bytes == self.records.counters().arena_bytes)

    def submit(self, expert: int, slot: int, cause: Cause = Cause.DEMAND) -> None:
        self.mover.submit(Fetch(ExpertKey(0, expert), slot, RECORD_BYTES, cause))

    def wait_for(self, num_fetches: int) -> list[Completion]:
        done: list[Completion] = []
        while len(done) < num_fetches:
            done.extend(self.mover.wait())
        assert all(completion.error is None for completion in done), done
        return done

    def holds(self, slot: int, expert: int) -> bool:
        return bool((self.slots[slot] == expert).all())

    def close(self) -> None:
        self.mover.close()
        self.records.close()


def test_every_record_arrives_and_the_arena_is_pinned() -> None:
    rig = Rig()
    assert not warnings
    assert rig.records.borrow(ExpertKey(0, 7)).is_pinned()
    for first in range(0, NUM_EXPERTS, 8):
        for slot in range(8):
            rig.submit(first + slot, slot)
        rig.wait_for(8)
        assert all(rig.holds(slot, first + slot) for slot in range(8))
    rig.close()


def test_a_copy_waits_for_the_kernels_that_read_its_slot() -> None:
    rig = Rig()
    rig.submit(1, 0)
    rig.wait_for(1)
    torch.cuda._sleep(LONG_KERNEL_CYCLES)
    seen = rig.slots[0].clone()
    rig.mover.fence([0])
    rig.submit(2, 0)
    rig.wait_for(1)
    assert bool((seen == 1).all()), "overwritten while a kernel was still to read it"
    assert rig.holds(0, 2)
    rig.close()


def test_a_copy_into_another_slot_overtakes_a_running_kernel() -> None:
    rig = Rig()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_KERNEL_CYCLES)
    kernel_end = torch.cuda.Event()
    kernel_end.record()
    rig.mover.fence([0])
    rig.submit(3, 1)
    rig.wait_for(1)
    assert not kernel_end.query(), "the copy ended while the kernel ran"
    torch.cuda.synchronize()
    assert rig.holds(1, 3)
    rig.close()


def test_a_small_table_overtakes_the_records_that_have_begun() -> None:
    table = torch.arange(376, dtype=torch.int32, pin_memory=True)
    there, record = torch.zeros_like(table, device="cuda"), torch.ones(64 << 20, dtype=torch.uint8, pin_memory=True)
    copy_from_host(table, there)  # compiled
    there.zero_()
    slot, link = torch.empty_like(record, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(link):
        for _ in range(20):
            slot.copy_(record, non_blocking=True)
        records_there = torch.cuda.Event()
        records_there.record()
    copy_from_host(table, there)
    torch.cuda.current_stream().synchronize()
    assert not records_there.query(), "the table came behind 20 ms of records"
    assert torch.equal(there.cpu(), table)


def test_without_registration_records_still_arrive_through_a_pinned_buffer() -> None:
    rig = Rig(pinning=Refusing())
    assert len(warnings) == 1
    for slot in range(8):
        rig.submit(slot + 1, slot)
    rig.wait_for(8)
    assert all(rig.holds(slot, slot + 1) for slot in range(8))
    rig.close()


def test_a_refused_registration_is_an_answer_and_kernels_still_run() -> None:
    answers: list[str | None] = []
    nowhere = 1 << 46
    thread = threading.Thread(target=lambda: answers.append(CudaPinning().register(nowhere, 1 << 20)))
    thread.start()
    thread.join()
    assert answers[0]
    torch.zeros(100, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_a_paced_link_keeps_its_rate() -> None:
    rig = Rig(bytes_per_s=10e9)
    begin_s = time.perf_counter()
    for expert in range(NUM_EXPERTS):
        rig.submit(expert, expert % 8)
    rig.wait_for(NUM_EXPERTS)
    bytes_per_s = NUM_EXPERTS * RECORD_BYTES / (time.perf_counter() - begin_s)
    assert 9.5e9 < bytes_per_s < 10.1e9
    rig.close()


def test_the_devices_own_time_of_the_moves_fits_into_the_wall_time() -> None:
    rig = Rig()
    begin_s = time.perf_counter()
    for expert in range(NUM_EXPERTS):
        rig.submit(expert, expert % 8)
    rig.wait_for(NUM_EXPERTS)
    wall_s = time.perf_counter() - begin_s
    busy_s = sum(move.end_s - move.begin_s for move in rig.mover.take_moves())
    assert 0.5 * wall_s < busy_s < 1.02 * wall_s
    rig.close()


@pytest.mark.parametrize("layout", [Layout.FIXED, Layout.CODE_WIDTH])
def test_plain_records_decoded_on_the_device_are_those_of_the_cpu(layout: Layout) -> None:
    shapes, fmt = ((96, 1100), (1100, 48)), BaseFormat(bits=4, group=64, zero_point=True)
    matrices = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    bases = [encode_base(matrix, fmt) for matrix in matrices]
    base, record = pack_base(bases), encode_record(matrices, bases, fmt, layout)

    class OneExpert:
        def layout(self, key: ExpertKey) -> Layout:
            return layout

        def base_bytes(self, key: ExpertKey) -> int:
            return len(base)

        def record_bytes(self, key: ExpertKey) -> int:
            return len(record)

        def read_base_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
            buffer[:] = base.numpy().data

        def read_record_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
            buffer[:] = record.numpy().data

    buffer = bytearray(plain_record_bytes(shapes))
    PlainSource(OneExpert(), shapes, fmt, device="cuda").read_into(ExpertKey(0, 0), memoryview(buffer))
    assert bytes(buffer) == encode_record(matrices, [], fmt, Layout.PLAIN).numpy().tobytes()


def test_this_gpu_is_described_and_its_memory_is_read_from_the_driver() -> None:
    gpu = require_gpu()
    assert gpu.name == torch.cuda.get_device_name(0)
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    with PeakDeviceMemory() as memory:
        before_bytes = memory.peak_bytes
        block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        eventually(lambda: memory.peak_bytes >= before_bytes + (1 << 30))
        del block
        torch.cuda.empty_cache()
    assert memory.peak_bytes >= before_bytes + (1 << 30)
