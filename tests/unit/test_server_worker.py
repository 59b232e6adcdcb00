"""The engine worker: one at a time, in order, bounded; who leaves is cancelled between rounds; faults stay alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from moespeq.errors import OverloadError, StorageError, UnavailableError, UsageError
from moespeq.server.worker import Ended, EngineWorker, Turn, WorkerState
from moespeq.transfer.clock import MonotonicClock

WAIT_S = 10.0


class FakeEngine:
    """Yields numbers; `gate` holds every round until it is released."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.rounds: list[str] = []
        self.closed: list[str] = []
        self.thread: int | None = None

    def generate(self, name: str, num_rounds: int, error: BaseException | None = None) -> Iterator[str]:
        try:
            for number in range(num_rounds):
                assert self.gate.acquire(timeout=WAIT_S)
                self.thread = threading.get_ident()
                self.rounds.append(name)
                yield f"{name}{number}"
            if error is not None:
                raise error
        finally:
            self.closed.append(name)


class Inbox:
    def __init__(self) -> None:
        self._items: queue.Queue[Any] = queue.Queue()
        self.put = self._items.put

    def next(self) -> Any:
        return self._items.get(timeout=WAIT_S)

    def rest(self) -> list[Any]:
        """All until the end, that included."""
        items = [self.next()]
        while not isinstance(items[-1], Ended):
            items.append(self.next())
        return items


def work(name: str, *num_rounds: int, error: BaseException | None = None) -> list[Turn[FakeEngine]]:
    """A turn of each of `num_rounds`; the last one ends with `error`."""
    errors = [None] * (len(num_rounds) - 1) + [error]
    return [lambda engine, n=n, e=e: engine.generate(name, n, e) for n, e in zip(num_rounds, errors, strict=True)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> Iterator[EngineWorker[FakeEngine]]:
    made = _started(lambda: nullcontext(engine))
    yield made
    engine.gate.release(1000)
    made.close()


def _started(
    open_engine: Callable[[], AbstractContextManager[FakeEngine]], *, max_waiting: int = 2
) -> EngineWorker[FakeEngine]:
    settled = threading.Event()
    made = EngineWorker(open_engine, max_waiting=max_waiting, clock=MonotonicClock(), on_state=lambda _: settled.set())
    made.start()
    assert settled.wait(WAIT_S)
    return made


def test_tickets_are_served_one_at_a_time_in_order_of_arrival(
    worker: EngineWorker[FakeEngine], engine: FakeEngine
) -> None:
    first, second = Inbox(), Inbox()
    worker.submit(work("a", 2), first.put)
    worker.submit(work("b", 2), second.put)
    engine.gate.release(4)
    assert first.rest() == ["a0", "a1", Ended()]
    assert second.rest() == ["b0", "b1", Ended()]
    assert engine.rounds == ["a", "a", "b", "b"]


def test_the_engine_is_used_by_the_workers_thread_only(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    inbox = Inbox()
    engine.gate.release()
    worker.submit(work("a", 1), inbox.put)
    inbox.rest()
    assert engine.thread not in (None, threading.get_ident())


def test_turns_of_two_tickets_take_turns(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    many, one, late = Inbox(), Inbox(), Inbox()
    worker.submit(work("m", 1, 2, 1), many.put)
    worker.submit(work("a", 1), one.put)
    engine.gate.release(2)
    assert one.rest() == ["a0", Ended()]
    worker.submit(work("b", 1), late.put)
    engine.gate.release(4)
    assert many.rest() == ["m0", "m0", "m1", "m0", Ended()]
    assert late.rest() == ["b0", Ended()]
    assert engine.rounds == ["m", "a", "m", "m", "b", "m"]


def test_a_ticket_queues_again_where_the_queue_is_full(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    running, waiting = Inbox(), [Inbox(), Inbox()]
    worker.submit(work("m", 2, 1), running.put)
    engine.gate.release()
    running.next()
    for inbox in waiting:
        worker.submit(work("a", 1), inbox.put)
    engine.gate.release(4)
    assert [inbox.rest() for inbox in waiting] == [["a0", Ended()]] * 2
    assert running.rest() == ["m1", "m0", Ended()]


def test_a_fault_in_one_turn_ends_the_ticket(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    inbox, fault = Inbox(), RuntimeError("a kernel failed")
    first, *_ = work("a", 1, error=fault)
    worker.submit([first, *work("b", 1)], inbox.put)
    engine.gate.release(2)
    assert inbox.rest() == ["a0", Ended(fault)]
    assert engine.rounds == ["a"]


def test_a_ticket_cancelled_between_two_turns_has_no_other(
    worker: EngineWorker[FakeEngine], engine: FakeEngine
) -> None:
    many, one = Inbox(), Inbox()
    ticket = worker.submit(work("m", 1, 1), many.put)
    worker.submit(work("a", 2), one.put)
    engine.gate.release(2)
    assert one.next() == "a0"
    ticket.cancel()
    engine.gate.release()
    one.rest()
    last = Inbox()
    worker.submit(work("b", 1), last.put)
    engine.gate.release()
    last.rest()
    assert engine.rounds == ["m", "a", "a", "b"]


def test_a_cancelled_ticket_ends_after_the_running_round(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    inbox = Inbox()
    ticket = worker.submit(work("a", 100), inbox.put)
    engine.gate.release()
    assert inbox.next() == "a0"
    ticket.cancel()
    engine.gate.release(100)
    inbox.rest()
    assert len(engine.rounds) <= 2
    assert engine.closed == ["a"], "its iterator must be closed, or the engine stays claimed"


def test_a_ticket_cancelled_in_the_queue_is_never_begun(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    first, second, third = Inbox(), Inbox(), Inbox()
    worker.submit(work("a", 2), first.put)
    engine.gate.release()
    first.next()
    left = worker.submit(work("b", 1), second.put)
    worker.submit(work("c", 1), third.put)
    left.cancel()
    engine.gate.release(3)
    first.rest()
    third.rest()
    assert engine.rounds == ["a", "a", "c"]


def test_a_full_queue_refuses_and_says_when_to_come_again(worker: EngineWorker[FakeEngine], engine: FakeEngine) -> None:
    running = Inbox()
    worker.submit(work("a", 2), running.put)
    engine.gate.release()
    running.next()
    waiting = [worker.submit(work("b", 1), Inbox().put) for _ in range(2)]
    with pytest.raises(OverloadError, match="2 requests are waiting already") as refused:
        worker.submit(work("c", 1), Inbox().put)
    assert 1 <= refused.value.retry_after_s <= 60
    assert worker.num_waiting == 2
    waiting[0].cancel()
    worker.submit(work("d", 1), Inbox().put)  # in the place of the one that left


class Panic(BaseException):
    """What a library written in Rust raises where it is at its wits' end."""


@pytest.mark.parametrize("fault", [RuntimeError("a kernel failed"), Panic("index out of bounds")])
def test_a_fault_fails_its_own_ticket_and_the_next_one_is_served(
    worker: EngineWorker[FakeEngine], engine: FakeEngine, fault: BaseException
) -> None:
    first, second = Inbox(), Inbox()
    worker.submit(work("a", 1, error=fault), first.put)
    worker.submit(work("b", 1), second.put)
    engine.gate.release(2)
    assert first.rest() == ["a0", Ended(fault)]
    assert second.rest() == ["b0", Ended()]


@pytest.mark.parametrize(
    ("error", "is_healthy"), [(StorageError("the disk is gone"), False), (UsageError("top_p must be"), True)]
)
def test_faults_in_a_row_make_it_unhealthy_until_a_request_succeeds(
    worker: EngineWorker[FakeEngine], engine: FakeEngine, error: Exception, is_healthy: bool
) -> None:
    engine.gate.release(4)
    for _ in range(3):
        inbox = Inbox()
        worker.submit(work("a", 1, error=error), inbox.put)
        inbox.rest()
    assert worker.is_healthy is is_healthy
    inbox = Inbox()
    worker.submit(work("b", 1), inbox.put)
    inbox.rest()
    assert worker.is_healthy


def test_nothing_is_taken_before_the_engine_is_loaded(engine: FakeEngine) -> None:
    loaded, settled = threading.Event(), threading.Event()

    def load() -> AbstractContextManager[FakeEngine]:
        assert loaded.wait(WAIT_S)
        return nullcontext(engine)

    worker = EngineWorker(load, max_waiting=2, clock=MonotonicClock(), on_state=lambda _: settled.set())
    worker.start()
    with pytest.raises(UnavailableError, match="being loaded"):
        worker.submit(work("a", 1), Inbox().put)
    assert worker.state is WorkerState.LOADING
    loaded.set()
    assert settled.wait(WAIT_S)
    assert worker.state is WorkerState.READY
    worker.close()


@pytest.mark.parametrize("error", [StorageError("the disk is gone"), Panic("index out of bounds")])
def test_a_load_that_fails_is_kept_and_everything_is_refused(error: BaseException) -> None:

    def load() -> AbstractContextManager[FakeEngine]:
        raise error

    worker = _started(load)
    assert (worker.state, worker.failure) == (WorkerState.FAILED, error)
    with pytest.raises(UnavailableError):
        worker.submit(work("a", 1), Inbox().put)
    worker.close()


def test_closing_ends_the_running_round_and_tells_who_waits(engine: FakeEngine) -> None:
    worker = _started(lambda: nullcontext(engine))
    running, waiting = Inbox(), Inbox()
    worker.submit(work("a", 100), running.put)
    worker.submit(work("b", 1), waiting.put)
    engine.gate.release()
    assert running.next() == "a0"
    closer = threading.Thread(target=worker.close)
    closer.start()
    told = waiting.rest()[-1]
    assert isinstance(told.error, UnavailableError)
    engine.gate.release()
    assert isinstance(running.rest()[-1].error, UnavailableError)
    closer.join(WAIT_S)
    assert worker.state is WorkerState.CLOSED
    assert engine.closed == ["a"]
    worker.close()
