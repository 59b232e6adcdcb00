"""How a server ends: answers have their time, then the worker cuts them, and every client is told why.

Uvicorn alone would cancel its tasks, whose clients then learn nothing. So the worker closes first: who waits is told at
once, who is served after the running round, each by its own stream or status. Only what does not end then, such as a
body that never comes whole, is cancelled. A second signal is the end of the time that answers have; uvicorn's own way
to force an end would leave the tasks to asyncio, with their tracebacks, and the worker in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moespeq.errors import UnavailableError
from moespeq.server.failures import COME_BACK_S, error_answer
from moespeq.server.service import Service
from moespeq.server.worker import CLOSING

__all__ = ["CutOff", "EndingServer"]

_LAST_ROUND_S = 10  # for the running round, or chunk of a prefill, and for the last words


class EndingServer(uvicorn.Server):
    """Closes the service's worker `grace_s` after a signal, at a second one, or when all answers have ended."""

    def __init__(self, config: uvicorn.Config, service: Service, *, grace_s: int) -> None:
        config.timeout_graceful_shutdown = grace_s + _LAST_ROUND_S
        super().__init__(config)
        self._service, self._grace_s = service, grace_s
        self._is_urgent = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; the first one is raised again when the server has ended."""
        if self.should_exit:
            self._is_urgent.set()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it, with the cut in between."""
        cut = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    async def _cut(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_urgent.wait(), self._grace_s)
        await run_in_threadpool(self._service.worker.close)


class CutOff:
    """Middleware that answers a request which is cancelled at the end, where no answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            closing = UnavailableError(CLOSING, retry_after_s=COME_BACK_S)
            await (await error_answer(Request(scope), closing))(scope, receive, send)
