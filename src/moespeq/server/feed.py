"""From the engine's thread to a client: events cross into the event loop, and a client that leaves cancels its ticket.

Order: the worker's thread posts each event to the loop, whose queue keeps their order; a watcher waits for the client's
disconnect all the while, in the queue too, since only it can tell that nobody waits for an answer that is not sent yet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from moespeq.server.failures import ClientGoneError, error_body, explained
from moespeq.server.worker import Ended, EngineWorker, Ticket, Turn

__all__ = ["events_of", "server_sent"]

E = TypeVar("E")


async def events_of(worker: EngineWorker[E], turns: Iterable[Turn[E]], request: Request) -> AsyncIterator[Any]:
    """What `turns` yield. Raises what submitting or a turn raises, and ClientGoneError when nobody reads on."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def deliver(event: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and everybody gone
            loop.call_soon_threadsafe(arrived.put_nowait, event)

    ticket = worker.submit(turns, deliver)
    watcher = asyncio.create_task(_cancel_when_gone(request, ticket, arrived))
    try:
        while not isinstance(event := await arrived.get(), Ended):
            yield event
        if event.error is not None:
            raise explained(event.error)
    finally:
        ticket.cancel()
        watcher.cancel()


async def _cancel_when_gone(request: Request, ticket: Ticket[E], arrived: asyncio.Queue[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    ticket.cancel()  # at once: a response that could not be sent reads no more events
    arrived.put_nowait(Ended(ClientGoneError("The client left before its answer was complete.")))


async def server_sent(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """`chunks` as server-sent events, ended by [DONE]. An error behind the first is an event too: its status is out."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except ClientGoneError:
        return
    except Exception as error:
        yield _event(error_body(explained(error))[1])
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
