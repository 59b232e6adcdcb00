"""An engine whose seconds are its own thread's processor time, and whose link exists only as numbers.

What else runs on the machine takes no part in either, so that two runs can be compared where cores are busy. Passes,
routes, records and policy are the real ones: records are read when their copy would end, with the clock stopped. What
copying costs the processor is left out; on a real CPU it takes some of the cores from the passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from moespeq.ports import RecordSource
from moespeq.replay import LinkModel, VirtualClock, VirtualMover
from moespeq.transfer.moves import Move
from moespeq.types import Completion


class ProcessorClock(VirtualClock):
    """Processor time of the thread that asks, and what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped_s = 0.0

    def now_s(self) -> float:
        return time.thread_time() - self._stopped_s + super().now_s()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What the block takes is not counted."""
        begin_s = time.thread_time()
        yield
        self._stopped_s += time.thread_time() - begin_s


class Pace:
    """Bytes a second of the links made after it, to be changed between two runs."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s


class NumberedMover(VirtualMover):
    """A VirtualMover that brings the records too; a ThreadMover's arguments, and the pace."""

    def __init__(
        self,
        source: RecordSource,
        slots: Sequence[memoryview],
        *,
        num_threads: int,
        clock: ProcessorClock,
        pace: Pace,
    ) -> None:
        super().__init__(clock, LinkModel(pace.bytes_per_s, depth=num_threads))
        self._source, self._slots, self._stopping, self._pace = source, slots, clock.stopped, pace
        self._moves: list[Move] = []

    def poll(self) -> Sequence[Completion]:
        arrived = super().poll()
        with self._stopping():
            for completion in arrived:
                fetch, end_s = completion.fetch, completion.ended_s
                assert end_s is not None
                skip_bytes = self._source.num_bytes(fetch.key) - fetch.num_bytes
                self._source.read_into(fetch.key, self._slots[fetch.slot], skip_bytes=skip_bytes)
                self._moves.append(Move(end_s - fetch.num_bytes / self._link.bytes_per_s, end_s, fetch.num_bytes))
        return arrived

    def take_moves(self) -> list[Move]:
        """As ThreadMover's. Between two rounds nothing is submitted, so a new pace begins here."""
        moves, self._moves = self._moves, []
        self._link = LinkModel(self._pace.bytes_per_s, depth=self._link.depth)
        return moves


@contextmanager
def processor_time(pace: Pace) -> Iterator[None]:
    """Engines that are opened on the CPU inside the block run so."""

    def mover(
        source: RecordSource, slots: Sequence[memoryview], *, num_threads: int, clock: ProcessorClock
    ) -> NumberedMover:
        return NumberedMover(source, slots, num_threads=num_threads, clock=clock, pace=pace)

    with (
        patch("moespeq.decode.assembly.MonotonicClock", ProcessorClock),
        patch("moespeq.decode.tier_cpu.ThreadMover", mover),
    ):
        yield
