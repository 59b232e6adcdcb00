"""Copies that have begun, in the order in which they end. The mover changes it under its lock; any thread may look."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from moespeq.transfer.copy_stream import Point
from moespeq.transfer.moves import Move
from moespeq.types import Fetch

__all__ = ["BegunCopies", "CopyJob"]


@dataclass(slots=True, eq=False)
class CopyJob:
    """A fetch on its way: its slot's fence, its record once that is in host memory, its copy once that has begun."""

    fetch: Fetch
    after: Point | None
    record: Tensor | None = None
    ready_s: float = 0.0
    copy: object | None = None
    buffer: Tensor | None = None  # pinned, where the record itself is not
    reserved: Move | None = None

    @property
    def report_s(self) -> float:
        """No sooner is the copy reported."""
        return 0.0 if self.reserved is None else self.reserved.end_s


class BegunCopies:
    """The oldest first; `num_bytes` of all of them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._jobs: deque[CopyJob] = deque()
        self._by_slot: dict[int, CopyJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def oldest(self) -> CopyJob | None:
        try:
            return self._jobs[0]
        except IndexError:
            return None

    def of(self, fetch: Fetch) -> CopyJob | None:
        """The copy of this very fetch, if it has begun and was not found ended."""
        job = self._by_slot.get(fetch.slot)
        return job if job is not None and job.fetch is fetch else None

    def add(self, job: CopyJob) -> None:
        """It has begun."""
        self._jobs.append(job)
        self._by_slot[job.fetch.slot] = job
        self.num_bytes += job.fetch.num_bytes

    def remove_oldest(self) -> None:
        """It has ended."""
        job = self._jobs.popleft()
        del self._by_slot[job.fetch.slot]
        self.num_bytes -= job.fetch.num_bytes
