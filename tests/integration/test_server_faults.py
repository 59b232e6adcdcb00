"""Who leaves is cancelled within a round, in the queue as well; an engine's fault fails its request, not the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moespeq.decode.engine import Engine
from moespeq.decode.loop import SpeculativeLoop
from moespeq.errors import BudgetError, StorageError
from served import MODEL, PROMPT, Client

LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 110, "ignore_eos": True}
WAIT_S = 60.0
Leave = Callable[[], Awaitable[None]]


async def connect(
    client: Client, body: dict[str, Any], sent: asyncio.Queue[dict[str, Any]], left: asyncio.Event
) -> None:
    """One request as a web server makes it; the client leaves when `left` is set."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    whole = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> dict[str, Any]:
        first = next(whole, None)
        if first is not None:
            return first
        await left.wait()
        return {"type": "http.disconnect"}

    await asyncio.wait_for(client.app(scope, receive, sent.put), WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def count_rounds(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """Grows by one a round."""
    rounds, propose = [], SpeculativeLoop.propose

    def counting(self: SpeculativeLoop, *arguments: Any) -> Any:
        rounds.append(len(rounds))
        return propose(self, *arguments)

    monkeypatch.setattr(SpeculativeLoop, "propose", counting)
    return rounds


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_is_cancelled_within_a_round(
    client: Client, served_engine: Engine, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    rounds = count_rounds(monkeypatch, served_engine)
    worker = client.service.worker

    async def leave() -> int:
        sent, left = asyncio.Queue[dict[str, Any]](), asyncio.Event()
        call = asyncio.create_task(connect(client, LONG | {"stream": is_streamed}, sent, left))
        await until(lambda: len(rounds) >= 3)
        left.set()
        seen = len(rounds)
        await call
        await until(lambda: worker.num_running == 0)
        return len(rounds) - seen

    assert asyncio.run(leave()) <= 2, "the running round, and one that began before the event loop had its turn"
    assert client.text(max_tokens=4) == served_engine.generate(PROMPT, max_new_tokens=4).text


def test_a_client_that_leaves_the_queue_is_never_served(client: Client, served_engine: Engine) -> None:
    worker = client.service.worker

    async def leave() -> list[dict[str, Any]]:
        first_left, second_left = asyncio.Event(), asyncio.Event()
        first_sent, second_sent = asyncio.Queue[dict[str, Any]](), asyncio.Queue[dict[str, Any]]()
        first = asyncio.create_task(connect(client, LONG, first_sent, first_left))
        await until(lambda: worker.num_running == 1)
        second = asyncio.create_task(connect(client, LONG, second_sent, second_left))
        await until(lambda: worker.num_waiting == 1)
        second_left.set()
        await second
        assert worker.num_waiting == 0
        first_left.set()
        await first
        await until(lambda: worker.num_running == 0)
        return [second_sent.get_nowait()]

    assert asyncio.run(leave())[0]["status"] == 499


def test_a_client_that_leaves_within_its_request_is_no_fault_of_the_server(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> dict[str, Any]:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        said = {"headers": [(b"content-type", b"application/json")]}
        sent = asyncio.Queue[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        await asyncio.wait_for(client.app(scope | said, receive, sent.put), WAIT_S)
        return sent.get_nowait()

    assert asyncio.run(leave())["status"] == 499
    assert not caplog.records


def test_a_full_queue_is_429_with_a_time_to_come_again(client: Client) -> None:
    worker = client.service.worker

    async def overload() -> tuple[dict[str, Any], dict[str, Any]]:
        left, calls = asyncio.Event(), []
        for number in range(9):  # one runs, eight wait
            calls.append(asyncio.create_task(connect(client, LONG, asyncio.Queue(), left)))
            await until(lambda number=number: worker.num_running + worker.num_waiting == number + 1)
        sent = asyncio.Queue[dict[str, Any]]()
        await connect(client, LONG, sent, left)
        left.set()
        await asyncio.gather(*calls)
        await until(lambda: worker.num_running == 0)
        return sent.get_nowait(), json.loads(sent.get_nowait()["body"])

    start, body = asyncio.run(overload())
    assert start["status"] == 429
    assert 1 <= int(dict(start["headers"])[b"retry-after"]) <= 60
    assert body["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("fault", "words"),
    [(StorageError("The disk is gone; mount it."), "The disk is gone; mount it."), (RuntimeError("secret"), "report")],
)
@pytest.mark.parametrize("fails_at", [0, 2])
def test_an_engine_fault_fails_its_request_and_the_next_is_served(
    client: Client, monkeypatch: pytest.MonkeyPatch, fault: Exception, words: str, fails_at: int
) -> None:
    before, propose = client.text(max_tokens=8), SpeculativeLoop.propose
    rounds = iter(range(1000))

    def failing(self: SpeculativeLoop, *arguments: Any) -> Any:
        if next(rounds) == fails_at:
            raise fault
        return propose(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeLoop, "propose", failing)
        failed = client.post("/v1/completions", **LONG)
    assert failed.status_code == 500
    assert words in failed.json()["error"]["message"]
    assert "secret" not in failed.text
    assert client.text(max_tokens=8) == before
    assert client.get("/health").status_code == 200


def test_memory_that_ran_out_is_503_with_a_time_to_come_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: SpeculativeLoop, *arguments: Any) -> Any:
        raise BudgetError("The device has no room for 8 MiB more; take a smaller context.")

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeLoop, "first", failing)
        failed = client.post("/v1/completions", **LONG)
    assert failed.status_code == 503
    assert int(failed.headers["Retry-After"]) > 0


def test_a_fault_in_a_stream_is_its_last_event(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: SpeculativeLoop, *arguments: Any) -> Any:
        raise StorageError("The disk is gone; mount it.")

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeLoop, "propose", failing)
        chunks = client.stream(prompt=PROMPT, max_tokens=8)
    assert chunks[0]["choices"][0]["text"]
    assert chunks[-1]["error"]["message"] == "The disk is gone; mount it."


def test_faults_in_a_row_are_told_by_health_until_one_answer_succeeds(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: SpeculativeLoop, *arguments: Any) -> Any:
        raise RuntimeError("the device fell off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeLoop, "first", failing)
        statuses = [client.post("/v1/completions", **LONG).status_code for _ in range(3)]
    assert statuses == [500, 500, 500]
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "unhealthy"})
    assert int(health.headers["Retry-After"]) > 0
    client.text(max_tokens=2)
    assert client.get("/health").status_code == 200
