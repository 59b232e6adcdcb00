"""A connection whose client owes bytes of a request for too long is closed: it would keep its place for ever.

What is waited for is a whole request, head and body, however slowly its bytes come. A client that waits for its answer
owes nothing, and one that idles between two requests is uvicorn's to close.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["PatientProtocol"]

_PATIENCE_S = 60.0  # for a request, which is some megabytes at most


class PatientProtocol(H11Protocol):
    """uvicorn's own, with one timer a connection."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(_PATIENCE_S, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
