"""Completions on their way from worker threads to the engine thread, and how failures are put into words.

The engine thread alone counts what it still expects; the queue's lock is what makes a record's bytes visible to it.
An interrupt while it waits takes nothing out, so it may simply wait again.
"""

from __future__ import annotations

import queue

from moespeq.errors import MoespeqError
from moespeq.types import Completion, ExpertKey, Fetch

__all__ = ["CompletionBox", "copy_failure", "failed_read", "read_failure"]


class CompletionBox:
    """One completion for each fetch expected. `post` is for any thread, everything else for the engine's."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._num_expected = 0

    @property
    def num_expected(self) -> int:
        """Fetches whose completion was not taken yet."""
        return self._num_expected

    def expect(self) -> None:
        """One more fetch will end."""
        self._num_expected += 1

    def forget(self) -> None:
        """One fetch was taken back: it will not end."""
        self._num_expected -= 1

    def post(self, done: Completion) -> None:
        """A fetch ended."""
        self._posted.put(done)

    def poll(self) -> list[Completion]:
        """What was posted since the last call; never blocks."""
        completions: list[Completion] = []
        while True:
            try:
                completions.append(self._open(self._posted.get_nowait()))
            except queue.Empty:
                return completions

    def wait(self) -> list[Completion]:
        """Block until a fetch has ended; empty only when none is expected."""
        if not self._num_expected:
            return []
        return [self._open(self._posted.get()), *self.poll()]

    def _open(self, done: Completion) -> Completion:
        self._num_expected -= 1
        return done


def failed_read(fetch: Fetch, error: Exception, seconds: float = 0.0) -> Completion:
    """The end of a fetch whose source raised; where that was no sentence of ours, the error goes along."""
    bug = None if isinstance(error, (MoespeqError, OSError)) else error
    return Completion(fetch, seconds, read_failure(fetch.key, error), bug=bug)


def read_failure(key: ExpertKey, error: Exception) -> str:
    """The sentence for a record that its source did not deliver."""
    if isinstance(error, MoespeqError):
        return str(error)
    return f"Expert {key.expert} of MoE layer {key.layer} could not be read ({error}); check the disk."


def copy_failure(key: ExpertKey, error: Exception) -> str:
    """The sentence for a record that the driver did not copy; the driver's text is many lines long."""
    lines = str(error).splitlines() or [type(error).__name__]
    return (
        f"Expert {key.expert} of MoE layer {key.layer} could not be copied to the GPU ({lines[0].rstrip('. ')}); "
        f"see whether another process took its memory, then try again."
    )
