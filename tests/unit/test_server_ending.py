"""A request that is cancelled when the server ends is told so, unless its answer has begun."""

from __future__ import annotations

import asyncio
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from moespeq.server.ending import CutOff, EndingServer

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}


def run_until_cancelled(begins: bool) -> list[dict[str, Any]]:
    """What is sent by an application that is cancelled while it works."""
    sent: list[dict[str, Any]] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if begins:
            await send(START)
        raise asyncio.CancelledError

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing more is read")

    async def call() -> None:
        await CutOff(application)(SCOPE, receive, send)

    asyncio.run(call())
    return sent


def test_a_request_that_is_cut_before_its_answer_is_told_when_to_come_back() -> None:
    start, body = run_until_cancelled(begins=False)
    assert start["status"] == 503
    assert b"retry-after" in dict(start["headers"])
    assert "shutting down" in json.loads(body["body"])["error"]["message"]


def test_an_answer_that_has_begun_is_not_given_a_second_status() -> None:
    with pytest.raises(asyncio.CancelledError):
        run_until_cancelled(begins=True)


def test_a_second_signal_cuts_the_answers_at_once_and_the_first_is_raised_again() -> None:
    closed: list[bool] = []
    worker: Any = SimpleNamespace(worker=SimpleNamespace(close=lambda: closed.append(True)))
    server = EndingServer(uvicorn.Config(CutOff, log_config=None), worker, grace_s=3600)

    async def end() -> None:
        cut = asyncio.create_task(server._cut())
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.01)
        assert not closed
        server.handle_exit(signal.SIGINT, None)
        await asyncio.wait_for(cut, 60)

    asyncio.run(end())
    assert closed == [True]
    assert server._captured_signals == [signal.SIGTERM]
