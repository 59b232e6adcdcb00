"""How long jobs say where they are. The command line draws bars from this; nothing here prints."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Meter", "ProgressSink"]


class ProgressSink(Protocol):
    """Receives the state of a job. Raising from `update` cancels the job; what is durable by then is kept."""

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """`done_bytes` of `total_bytes` are done; `what` names the present part in a word or two."""
        ...


class Meter:
    """Counts bytes towards a total and tells a sink, when there is one."""

    def __init__(self, sink: ProgressSink | None, total_bytes: int) -> None:
        self._sink, self._total_bytes, self._done_bytes = sink, total_bytes, 0

    def add(self, num_bytes: int, what: str) -> None:
        """`num_bytes` more are done."""
        self._done_bytes += num_bytes
        if self._sink is not None:
            self._sink.update(self._done_bytes, self._total_bytes, what)
