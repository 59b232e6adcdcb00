"""A Mover whose link is a RecordSource read by threads, straight into host slots (the device is RAM).

Ordering. The engine thread submits; the order of submission is already the order of priority, so workers take
fetches first in, first out. A worker writes only into the slot of the fetch it holds, and that slot belongs
to the mover until the engine thread takes the completion out of `poll` or `wait`; the completion queue's lock
is what makes the written bytes visible before that. What a source is expected to raise (MoespeqError,
OSError) travels as text in the completion, because only policy knows whether anybody needs the record; any
other exception is our bug and is raised again in the engine thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from moespeq.errors import MoespeqError
from moespeq.ports import Clock, RecordSource
from moespeq.types import Completion, Fetch

__all__ = ["ThreadMover"]


class ThreadMover:
    """Copies records from `source` into `slots` with `num_threads` workers. For the engine thread only."""

    def __init__(self, source: RecordSource, slots: Sequence[memoryview], *, num_threads: int, clock: Clock) -> None:
        assert num_threads > 0, num_threads
        self._source = source
        self._slots = slots
        self._clock = clock
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        self._num_in_flight = 0
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
        self._num_in_flight += 1
        self._fetches.put(fetch)

    def poll(self) -> Sequence[Completion]:
        completions: list[Completion] = []
        while True:
            try:
                completions.append(self._take(self._done.get_nowait()))
            except queue.Empty:
                return completions

    def wait(self) -> Sequence[Completion]:
        if not self._num_in_flight:
            return []
        return [self._take(self._done.get()), *self.poll()]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for _ in self._threads:
            self._fetches.put(None)
        for thread in self._threads:
            thread.join()

    def _take(self, done: Completion | Exception) -> Completion:
        self._num_in_flight -= 1
        if isinstance(done, Exception):
            raise done
        return done

    def _work(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            self._done.put(self._carry_out(fetch))

    def _carry_out(self, fetch: Fetch) -> Completion | Exception:
        begin_s = self._clock.now_s()
        try:
            self._source.read_into(fetch.key, self._slots[fetch.slot])
        except MoespeqError as error:
            return Completion(fetch, self._clock.now_s() - begin_s, str(error))
        except OSError as error:
            layer, expert = fetch.key
            text = f"Expert {expert} of MoE layer {layer} could not be read ({error}); check the disk."
            return Completion(fetch, self._clock.now_s() - begin_s, text)
        except Exception as bug:
            return bug
        return Completion(fetch, self._clock.now_s() - begin_s)
