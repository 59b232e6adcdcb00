"""One thread that owns the engine, and the bounded queue in front of it. Knows neither HTTP nor what an engine does.

The thread loads the engine, serves tickets, and closes the engine: nobody else calls it. A ticket is served turn by
turn, in order of arrival; where it has another one, it queues for that again, behind those that came meanwhile. So a
request of a hundred answers delays another one by one answer. A turn is an iterator whose every item, one a round, is
handed to `deliver`; between two items the thread looks whether the ticket was cancelled, and then closes the iterator,
which gives the engine back: who leaves costs at most the running round. What a turn raises goes to its own ticket as
the error of its `Ended`, and the thread goes on with the next; only a load that fails ends it.

The lock guards the queue and the state; work, load and delivery run outside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from moespeq.errors import OverloadError, UnavailableError, UsageError
from moespeq.ports import Clock

__all__ = ["CLOSING", "Ended", "EngineWorker", "Ticket", "Turn", "WorkerState"]

E = TypeVar("E")
Turn = Callable[[E], Generator[Any, None, None]]
"""What the engine does for a ticket at a time; closed early, it gives the engine back."""

_FAULTS_UNTIL_UNHEALTHY = 3  # in a row: one may be its request's
_PATIENCE_S = (1, 60)  # the least and most that a client is told to wait
CLOSING = "The server is shutting down; send the request again when it is back."


class WorkerState(Enum):
    """Where the thread is in its life."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last that a ticket delivers; `error` is why it ended early."""

    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class Ticket(Generic[E]):
    """A place in the queue. turn: the next one; later: those behind it, asked for when the one before has ended.

    deliver: called by the worker's thread with what the turns yield, then with an Ended.
    """

    turn: Turn[E]
    later: Iterator[Turn[E]]
    deliver: Callable[[Any], None]
    served_s: float = 0.0
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for it any more; it ends before the next round. From any thread, at any time."""
        self.is_cancelled = True


class EngineWorker(Generic[E]):
    """`start`, then `submit` from any thread, then `close`.

    open_engine: loads; its context is entered and left by the worker's thread. on_state: hears of READY and FAILED
    there.
    """

    def __init__(
        self,
        open_engine: Callable[[], AbstractContextManager[E]],
        *,
        max_waiting: int,
        clock: Clock,
        on_state: Callable[[WorkerState], None] = lambda _: None,
    ) -> None:
        if max_waiting < 1:
            raise UsageError(f"The queue needs room for at least 1 request, got {max_waiting}.")
        self._open_engine, self._max_waiting, self._clock, self._on_state = open_engine, max_waiting, clock, on_state
        self._thread = threading.Thread(target=self._live, name="moespeq-engine", daemon=True)
        self._changed = threading.Condition()
        self._waiting: deque[Ticket[E]] = deque()
        self._running: Ticket[E] | None = None
        self._state, self._is_closing = WorkerState.LOADING, False
        self._engine: E | None = None
        self._num_faults = 0
        self._mean_service_s = 0.0
        self.failure: BaseException | None = None

    @property
    def state(self) -> WorkerState:
        """Where it is now; may have changed when the caller looks."""
        return self._state

    @property
    def is_healthy(self) -> bool:
        """Ready, and not every one of the last requests was failed by the engine."""
        return self._state is WorkerState.READY and self._num_faults < _FAULTS_UNTIL_UNHEALTHY

    @property
    def num_waiting(self) -> int:
        """Tickets in the queue that somebody waits for."""
        with self._changed:
            return sum(not ticket.is_cancelled for ticket in self._waiting)

    @property
    def num_running(self) -> int:
        """1 while the engine works."""
        return int(self._running is not None)

    @property
    def engine(self) -> E:
        """For what never changes: tokenizer, plan, defaults. Raises UnavailableError before it is loaded and after."""
        if self._engine is None:
            raise self._unavailable()
        return self._engine

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    def submit(self, turns: Iterable[Turn[E]], deliver: Callable[[Any], None]) -> Ticket[E]:
        """Queue for `turns`, at least one. Raises OverloadError where the queue is full, UnavailableError where nobody
        would serve them.
        """
        later = iter(turns)
        ticket = Ticket(next(later), later, deliver)
        with self._changed:
            if self._engine is None or self._is_closing:
                raise self._unavailable()
            if len(self._waiting) >= self._max_waiting:
                self._waiting = deque(waiting for waiting in self._waiting if not waiting.is_cancelled)
            if len(self._waiting) >= self._max_waiting:
                raise OverloadError(
                    f"{len(self._waiting)} requests are waiting already, as many as the queue holds; try again later.",
                    retry_after_s=self._patience_s(),
                )
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def close(self) -> None:
        """End what runs after its round and what waits at once, then close the engine. Calling it twice is allowed.

        A load cannot be interrupted: its thread is left to close what it has loaded.
        """
        with self._changed:
            self._is_closing = True
            dropped, self._waiting = list(self._waiting), deque()
            if self._running is not None:
                self._running.cancel()
            self._changed.notify()
        for ticket in dropped:
            ticket.deliver(Ended(UnavailableError(CLOSING, retry_after_s=self._patience_s())))
        if self._state is not WorkerState.LOADING and self._thread.ident is not None:
            self._thread.join()

    def _live(self) -> None:
        try:
            with self._open_engine() as engine:
                with self._changed:
                    self._engine, self._state = engine, WorkerState.READY
                self._on_state(WorkerState.READY)
                while (ticket := self._next()) is not None:
                    self._serve(engine, ticket)
        except BaseException as error:
            self.failure, self._state = error, WorkerState.FAILED
        else:
            self._state = WorkerState.CLOSED
        self._engine = None
        self._on_state(self._state)

    def _next(self) -> Ticket[E] | None:
        """The ticket whose turn it is, or None when the worker is to end."""
        with self._changed:
            self._running = None
            while not self._is_closing:
                while self._waiting:
                    ticket = self._waiting.popleft()
                    if not ticket.is_cancelled:
                        self._running = ticket
                        return ticket
                self._changed.wait()
        return None

    def _serve(self, engine: E, ticket: Ticket[E]) -> None:
        """One turn; then the ticket queues again, or ends."""
        begin_s, error, following = self._clock.now_s(), None, None
        try:
            with closing(ticket.turn(engine)) as items:
                for item in items:
                    ticket.deliver(item)
                    if ticket.is_cancelled:
                        break
            following = None if ticket.is_cancelled else next(ticket.later, None)
            self._num_faults = 0
        except BaseException as raised:  # whatever it is, a library's panic too, it is this request's alone
            error = raised
            self._num_faults += not isinstance(raised, UsageError)
        ticket.served_s += self._clock.now_s() - begin_s
        if following is None or not self._queue_again(ticket, following):
            self._end(ticket, error)

    def _queue_again(self, ticket: Ticket[E], following: Turn[E]) -> bool:
        """Its place was taken when it came, so a full queue has room; False where the worker is to end."""
        with self._changed:
            if not self._is_closing:
                ticket.turn = following
                self._waiting.append(ticket)
            return not self._is_closing

    def _end(self, ticket: Ticket[E], error: BaseException | None) -> None:
        if error is None and self._is_closing and ticket.is_cancelled:
            error = UnavailableError(CLOSING, retry_after_s=self._patience_s())
        mean_s, served_s = self._mean_service_s, ticket.served_s
        self._mean_service_s += (served_s - mean_s) / 4 if mean_s else served_s
        ticket.deliver(Ended(error))

    def _patience_s(self) -> int:
        """After how long a place in a full queue should be free."""
        least, most = _PATIENCE_S
        return min(most, max(least, round(self._mean_service_s)))

    def _unavailable(self) -> UnavailableError:
        if self._is_closing or self._state is not WorkerState.LOADING:
            return UnavailableError(CLOSING, retry_after_s=self._patience_s())
        return UnavailableError("The model is being loaded; /health says how far.", retry_after_s=5)
