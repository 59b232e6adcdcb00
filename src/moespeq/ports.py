"""The three ways policy meets the world. `residency` knows these protocols and nothing behind them, so that the same
policy runs on CUDA, on CPU threads and on a virtual clock.

Ordering contract of a Mover: the engine thread owns all policy state. A mover may run threads or streams of its own,
but it hands results back only through `poll` and `wait`, which the engine thread calls; a record is readable by
kernels launched after its Completion was returned, or after `wait_on_device` said yes, and never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moespeq.types import Completion, ExpertKey, Fetch

__all__ = ["Clock", "Mover", "RecordSource"]


@runtime_checkable
class Clock(Protocol):
    """Monotonic time in seconds."""

    def now_s(self) -> float: ...


@runtime_checkable
class RecordSource(Protocol):
    """Where records come from (disk, or a host cache in front of it). Safe to call from several threads."""

    def num_bytes(self, key: ExpertKey) -> int:
        """Exact length of the record."""
        ...

    def read_into(self, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        """Fill the front of `buffer` with the record from `skip_bytes` on: 0, or the length of the base in front of it.

        Raises StorageError or StoreError, naming the file.
        """
        ...


@runtime_checkable
class Mover(Protocol):
    """Copies records into slots. Never called for a slot that holds a pinned record.

    A submitted fetch is queued until its copy begins and in flight from then on. Queued fetches begin in order of their
    cause, then of submission, so a demand overtakes every guess that has not begun.
    """

    def submit(self, fetch: Fetch) -> None:
        """Queue a copy. The slot is the mover's until its completion is returned or the fetch is cancelled."""
        ...

    def cancel(self, fetch: Fetch) -> bool:
        """Take back a submitted fetch. True when its copy had not begun: it never will, no Completion comes and the
        slot is the caller's again. False when it began or ended: its Completion comes as ever. Never blocks.
        """
        ...

    def wait_on_device(self, fetch: Fetch) -> bool:
        """True: kernels launched from here on wait for this fetch by themselves, so they may read its slot although its
        Completion is still to come. False where only the Completion says that it is there. Never blocks.
        """
        ...

    def begin_ahead(self, num_bytes: int) -> None:
        """From here on begin copies of so many bytes ahead, where more than what moves must be begun at all.

        Much where the engine thread looks in seldom, little where a demand must soon have its turn.
        """
        ...

    def poll(self) -> Sequence[Completion]:
        """Completions since the last call, in order of arrival; never blocks."""
        ...

    def wait(self) -> Sequence[Completion]:
        """Block until at least one submitted fetch ends; empty only when nothing is in flight."""
        ...

    def close(self) -> None:
        """Wait for what is in flight, then release threads and files. Calling it twice is allowed."""
        ...
