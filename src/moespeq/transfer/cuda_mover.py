"""A Mover over a link that works by itself: copies from host memory into slots on a stream of the device.

The way of a fetch: `submit` asks HostRecords for the record; once that is there, in whichever thread, the fetch joins
the link's queue; the most urgent are begun, a few at a time; ended ones become completions, which the engine thread
takes out of `poll` or `wait`. So a disk read never holds up the link.

Who does it. Any thread that has a reason to look calls `_advance`, one at a time: the engine thread whenever it is
here, a reader that has just brought a record, and a thread of our own that sleeps until the oldest copy ends and keeps
the link going while the engine thread is elsewhere. The engine thread waits for the device itself, not for another
thread: waking one takes longer than the copy of a record.

Ordering. Copies on the stream cannot be overtaken, so few are begun, and everything else is still in order of
urgency, then of submission. How few is a trade: Python runs in one thread at a time, so whenever the engine thread
computes for longer than the begun copies last, the link runs dry; `begin_ahead` says how much it may begin. Kernels
may be reading the slot that a copy overwrites: `fence(slots)` marks a point on the compute stream behind the kernels
that read these slots, and a copy into one of them waits for it on the device. Copies into other slots wait for
nothing. In the other direction nothing is needed: a completion is made after its copy ended, and kernels that read
the slot are launched after it was returned; or else `wait_on_device` queues the wait for a begun copy in front of
them, and the host need not wake up in between.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from moespeq.ports import Clock
from moespeq.transfer.begun_copies import BegunCopies, CopyJob
from moespeq.transfer.completions import CompletionBox, copy_failure, failed_read
from moespeq.transfer.copy_stream import CopyStream, Point
from moespeq.transfer.host_records import HostRecords, Outcome
from moespeq.transfer.link_times import LinkTimes
from moespeq.transfer.moves import Move, MoveLog
from moespeq.transfer.urgency_queue import UrgencyQueue
from moespeq.types import Completion, Fetch

__all__ = ["CudaMover"]


_LOOK_EVERY_S = 2e-4  # shorter than `least_begun` copies on a fast link


class CudaMover:
    """Copies records into the slots of `stream`. For the engine thread only.

    bytes_per_s: None for the link as it is. least_begun: so many copies are begun however long they are.
    """

    def __init__(
        self,
        records: HostRecords,
        stream: CopyStream,
        *,
        clock: Clock,
        bytes_per_s: float | None = None,
        least_begun: int = 3,
        sleep_until: Callable[[float], None] | None = None,
    ) -> None:
        assert least_begun > 0, least_begun
        self._records, self._stream, self._clock = records, stream, clock
        self._sleep_until = sleep_until or self._sleep_on_clock
        self._least_begun, self._ahead_bytes = least_begun, 0
        self._times = LinkTimes(bytes_per_s)
        self._fences: dict[int, Point] = {}
        self._jobs: dict[int, CopyJob] = {}  # by slot, which is one fetch's until its completion
        self._link: UrgencyQueue[int] = UrgencyQueue()
        self._lock = threading.Lock()
        self._has_news = False
        self._begun = BegunCopies()
        self._free_buffers: list[Tensor] = []
        self._moves = MoveLog()
        self._done = CompletionBox()
        self._is_closed = False
        self._is_moving = threading.Event()
        self._looked_s = 0.0
        self._thread = threading.Thread(target=self._keep_moving, name="moespeq-link", daemon=True)
        self._thread.start()

    def submit(self, fetch: Fetch) -> None:
        assert not self._is_closed, "submit after close"
        assert fetch.num_bytes <= self._stream.slot_bytes, f"{fetch} does not fit its slot"
        job = CopyJob(fetch, self._fences.get(fetch.slot))
        self._jobs[fetch.slot] = job
        self._done.expect()
        self._records.request(fetch.key, fetch.cause, partial(self._on_ready, job))

    def cancel(self, fetch: Fetch) -> bool:
        if not self._records.withdraw(fetch.key):
            if not self._link.cancel(fetch.slot):
                return False
            self._records.give_back(fetch.key)
        del self._jobs[fetch.slot]
        self._done.forget()
        return True

    def wait_on_device(self, fetch: Fetch) -> bool:
        if self._times.bytes_per_s is not None:
            return False  # a paced copy counts as arrived later than it is
        job = self._begun.of(fetch)
        if job is None:
            return False
        self._stream.order_behind(job.copy)
        return True

    def begin_ahead(self, num_bytes: int) -> None:
        self._ahead_bytes = num_bytes

    def poll(self) -> Sequence[Completion]:
        self._advance()
        return self._done.poll()

    def wait(self) -> Sequence[Completion]:
        while True:
            done = self.poll()
            if done or not self._done.num_expected:
                return done
            job = self._begun.oldest
            if job is None:
                return self._done.wait()  # for a reader to bring a record, and all that follows
            with contextlib.suppress(RuntimeError):  # raised again, and put into words, where the copy is ended
                self._stream.wait_busily(job.copy)
            self._sleep_until(job.report_s)

    def fence(self, slots: Sequence[int]) -> Point:
        """Kernels launched so far read `slots`: a copy submitted later waits for them. Returns the point behind."""
        point = self._stream.fence()
        for slot in slots:
            self._fences[slot] = point
        return point

    def take_moves(self) -> list[Move]:
        """When the link was moving, since the last call."""
        return self._moves.take()

    def pace(self, bytes_per_s: float | None) -> None:
        """Slow the link down to `bytes_per_s`, or let it go, from the next copy on."""
        assert bytes_per_s is None or bytes_per_s > 0, bytes_per_s
        self._times.bytes_per_s = bytes_per_s

    def close(self) -> None:
        """Wait for the copies that have begun, drop the others, release the thread. Calling it twice is allowed."""
        if self._is_closed:
            return
        self._is_closed = True
        for job in list(self._jobs.values()):
            self.cancel(job.fetch)
        self._is_moving.set()
        self._thread.join()

    def _on_ready(self, job: CopyJob, outcome: Outcome) -> None:
        if isinstance(outcome, Exception):
            del self._jobs[job.fetch.slot]
            self._done.post(failed_read(job.fetch, outcome))
            return
        job.record, job.ready_s = _tail(outcome, job.fetch.num_bytes), self._clock.now_s()
        if not self._begin_at_once(job):
            self._link.put(job.fetch.slot, job.fetch.cause)
            if self._may_begin:
                self._advance()

    def _begin_at_once(self, job: CopyJob) -> bool:
        """Where nothing is queued and few are begun, a demand need not pass through the queue."""
        if len(self._link) or not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._may_begin:
                return False
            self._begin(self._jobs.pop(job.fetch.slot))
        finally:
            self._lock.release()
        if self._has_news:
            self._advance()  # for a thread that looked meanwhile and found the lock taken
        return True

    @property
    def _may_begin(self) -> bool:
        if self._is_closed:
            return False
        if self._times.bytes_per_s is not None:
            return not self._begun
        return len(self._begun) < self._least_begun or self._begun.num_bytes < self._ahead_bytes

    def _keep_moving(self) -> None:
        while not self._is_closed or self._begun:
            self._is_moving.wait()
            time.sleep(_LOOK_EVERY_S)
            if self._clock.now_s() - self._looked_s >= _LOOK_EVERY_S or self._is_closed:
                self._advance()
            self._is_moving.clear()
            if self._begun or self._is_closed:
                self._is_moving.set()

    def _sleep_on_clock(self, deadline_s: float) -> None:
        remaining_s = deadline_s - self._clock.now_s()
        if remaining_s > 0:
            time.sleep(remaining_s)

    def _advance(self) -> None:
        """End copies that have ended and begin those that may. Never waits: a thread that is at it looks again."""
        self._has_news = True
        while self._has_news and self._lock.acquire(blocking=False):
            try:
                self._has_news = False
                self._end_copies()
                while self._may_begin and (slot := self._link.take_now()) is not None:
                    self._begin(self._jobs.pop(slot))
            finally:
                self._lock.release()

    def _begin(self, job: CopyJob) -> None:
        assert job.record is not None, "in the link's queue without its record"
        try:
            job.copy = self._stream.begin(self._reachable(job, job.record), job.fetch.slot, job.after)
        except Exception as error:
            self._fail(job, error)
            return
        job.reserved = self._times.reserve(job.fetch.num_bytes, job.ready_s)
        self._begun.add(job)
        if not self._is_moving.is_set():
            self._is_moving.set()

    def _reachable(self, job: CopyJob, record: Tensor) -> Tensor:
        """The record where the copy engine can read it by itself: its place, or a buffer no begun copy still uses."""
        if self._records.is_pinned(record):
            return record
        job.buffer = self._free_buffers.pop() if self._free_buffers else self._records.pinned_buffer()
        copied = job.buffer[: record.numel()]
        np.copyto(copied.numpy(), record.numpy())
        return copied

    def _end_copies(self) -> None:
        now_s = self._looked_s = self._clock.now_s()
        ended: list[tuple[CopyJob, float]] = []
        while (job := self._begun.oldest) is not None and job.report_s <= now_s:
            try:
                if not self._stream.has_ended(job.copy):
                    break
                moved_s = self._stream.moved_s(job.copy)
            except Exception as error:
                self._begun.remove_oldest()
                self._fail(job, error)
                continue
            self._begun.remove_oldest()
            ended.append((job, moved_s))
        if not ended:
            return
        copies = [(job.fetch.num_bytes, moved_s, job.reserved) for job, moved_s in ended]
        for (job, _), move in zip(ended, self._times.ended(copies, now_s), strict=True):
            self._moves.add(move)
            self._end(job, Completion(job.fetch, move.end_s - move.begin_s, ended_s=move.end_s))

    def _fail(self, job: CopyJob, error: Exception) -> None:
        """The driver refused (RuntimeError and its kin), or a bug of ours."""
        bug = None if isinstance(error, RuntimeError) else error
        self._end(job, Completion(job.fetch, 0.0, copy_failure(job.fetch.key, error), bug=bug))

    def _end(self, job: CopyJob, done: Completion) -> None:
        if job.buffer is not None:
            self._free_buffers.append(job.buffer)
        self._records.give_back(job.fetch.key)
        self._done.post(done)


def _tail(record: Tensor, num_bytes: int) -> Tensor:
    """The last `num_bytes` of a record: all of it, or what lies behind its base."""
    return record if record.numel() == num_bytes else record[-num_bytes:]
