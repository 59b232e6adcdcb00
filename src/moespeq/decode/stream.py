"""A generation as people iterate it: claimed from the engine, interrupted between rounds, closed from any thread.

Owns whose turn the engine is while a stream lives; the generation underneath owns what a round does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from typing import Self

from moespeq.decode.generation import Generation, GenerationResult, StreamPiece
from moespeq.decode.interrupts import InterruptShield
from moespeq.errors import UsageError

__all__ = ["GenerationStream"]

_Claim = Callable[["weakref.ref[GenerationStream]"], AbstractContextManager[None]]


class GenerationStream:
    """An iterator of pieces. Afterwards `result` holds the whole; `cancel` ends it at the next round.

    The engine is claimed at the first piece and given back after the last, by `close`, or when the stream is dropped.
    """

    def __init__(self, generation: Generation, cancelled: threading.Event, claim: _Claim) -> None:
        self._generation, self._cancelled = generation, cancelled
        self._pieces = _claimed(generation, claim, weakref.ref(self))
        self._shield, self._is_aborted = InterruptShield(), False
        self._round_thread: int | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamPiece:
        """The next round's piece. Ctrl-C is raised between rounds, before the next one begins."""
        self._shield.raise_pending()
        if self._is_aborted:
            raise UsageError("The engine was closed before this generation ended; load it again.")
        with self._shield:
            self._round_thread = threading.get_ident()
            try:
                piece = next(self._pieces, None)
            finally:
                self._round_thread = None
        if self._is_aborted:
            self._give_back()  # who aborted during the round could not, and waits for it
        if piece is None:
            self._shield.raise_pending()
            raise StopIteration
        return piece

    @property
    def result(self) -> GenerationResult:
        """The finished generation; iterate to the end first."""
        return self._generation.result

    @property
    def has_result(self) -> bool:
        """Whether it ended as a generation ends; False before, and where it was closed or failed."""
        return self._generation.has_result

    @property
    def reused_tok(self) -> int:
        """Of the prompt's tokens, those that needed no prefill; known with the first token."""
        return self._generation.reused_tok

    @property
    def limit_tok(self) -> int:
        """How many tokens there will be at most."""
        return self._generation.limit_tok

    def cancel(self) -> None:
        """End after the running round; from any thread. The result's finish reason says so."""
        self._cancelled.set()

    def close(self) -> None:
        """Give the engine back before the end; the result is then lost."""
        self._pieces.close()

    def abort(self) -> bool:
        """Close from any thread; where another thread is inside a round, that thread ends after it.

        Returns False where the caller is inside a round himself: the generation then ends as a cancelled one.
        """
        self.cancel()
        if self._round_thread == threading.get_ident():
            return False
        self._is_aborted = True
        self._give_back()
        return True

    def _give_back(self) -> None:
        with suppress(ValueError):  # what closing a generator that is executing raises
            self._pieces.close()


def _claimed(
    generation: Generation, claim: _Claim, stream: weakref.ref[GenerationStream]
) -> Generator[StreamPiece, None, None]:
    """A generation that holds the engine. It must not hold its stream, or dropping that would not end it."""
    with claim(stream):
        yield from generation
