"""A Mover whose link is a RecordSource read by threads, straight into host slots (the device is RAM).

Ordering. Workers take the most urgent fetch, equals in the order of submission. A worker writes only into the slot of
the fetch it holds, and that slot belongs to the mover until the engine thread takes the completion out of `poll` or
`wait`, or takes the fetch back before a worker did; the completion queue's lock is what makes the written bytes visible
before that. What a source is expected to raise (MoespeqError, OSError) travels as text in the completion, because only
policy knows whether anybody needs the record; any other exception is our bug and is raised again in the engine thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moespeq.ports import Clock, RecordSource
from moespeq.transfer.completions import CompletionBox, failed_read
from moespeq.transfer.moves import Move, MoveLog
from moespeq.transfer.urgency_queue import UrgencyQueue
from moespeq.types import Completion, Fetch

__all__ = ["ThreadMover"]


class ThreadMover:
    """Copies records from `source` into `slots` with `num_threads` workers. For the engine thread only."""

    def __init__(self, source: RecordSource, slots: Sequence[memoryview], *, num_threads: int, clock: Clock) -> None:
        assert num_threads > 0, num_threads
        self._source = source
        self._slots = slots
        self._clock = clock
        self._fetches: UrgencyQueue[Fetch] = UrgencyQueue()
        self._done = CompletionBox()
        self._moves = MoveLog()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"moespeq-mover-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fetch: Fetch) -> None:
        assert not self._is_closed, "submit after close"
        assert fetch.num_bytes <= len(self._slots[fetch.slot]), f"{fetch} does not fit its slot"
        self._done.expect()
        self._fetches.put(fetch, fetch.cause)

    def cancel(self, fetch: Fetch) -> bool:
        if not self._fetches.cancel(fetch):
            return False
        self._done.forget()
        return True

    def wait_on_device(self, fetch: Fetch) -> bool:
        return False

    def begin_ahead(self, num_bytes: int) -> None:
        pass  # only what moves is begun

    def poll(self) -> Sequence[Completion]:
        return self._done.poll()

    def wait(self) -> Sequence[Completion]:
        return self._done.wait()

    def take_moves(self) -> list[Move]:
        """When the source was read, since the last call; with several threads they overlap."""
        return self._moves.take()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._fetches.close()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (fetch := self._fetches.take()) is not None:
            self._done.post(self._carry_out(fetch))

    def _carry_out(self, fetch: Fetch) -> Completion:
        begin_s = self._clock.now_s()
        try:
            skip_bytes = self._source.num_bytes(fetch.key) - fetch.num_bytes
            self._source.read_into(fetch.key, self._slots[fetch.slot], skip_bytes=skip_bytes)
        except Exception as error:
            return failed_read(fetch, error, self._clock.now_s() - begin_s)
        end_s = self._clock.now_s()
        self._moves.add(Move(begin_s, end_s, fetch.num_bytes))
        return Completion(fetch, end_s - begin_s)
