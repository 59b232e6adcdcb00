"""Several experts in work at once, handed on in order.

Encoding and decoding are long rows of small elementwise operations: experts beside each other scale over
cores, threads inside one operation do not. So each worker runs torch single-threaded; the setting is restored
at the end.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Self, TypeVar

import torch

__all__ = ["ExpertWorkers"]

T = TypeVar("T")
R = TypeVar("R")
MAX_WORKERS = 8


class ExpertWorkers:
    """A few threads. Memory is bounded: one expert in work for each, and one more that waits."""

    def __init__(self) -> None:
        self._num_workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._previous_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="expert")

    def in_order(self, work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """`work` of every task, in the order of `tasks`; each task is one expert's."""
        remaining = iter(tasks)
        pending: deque[Future[R]] = deque()
        try:
            while True:
                for task in islice(remaining, self._num_workers + 1 - len(pending)):
                    pending.append(self._pool.submit(work, task))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._previous_threads)
