"""Clients that never come to the end of a request lose their connection; those that wait for an answer do not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from moespeq.server import patience
from moespeq.server.listening import listen

PATIENCE_S, ANSWER_S, WAIT_S = 0.3, 0.9, 30.0
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\n"


async def slow_echo(scope: dict, receive: object, send: object) -> None:
    """Answers a request with its body, long after the patience for the request has passed."""
    message = await receive()
    if message["type"] != "http.request":
        return
    await asyncio.sleep(ANSWER_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": message["body"]})


@pytest.fixture(name="address")
def _address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(patience, "_PATIENCE_S", PATIENCE_S)
    with listen("127.0.0.1", 0) as listening:
        config = uvicorn.Config(slow_echo, http=patience.PatientProtocol, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield listening.getsockname()
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD, HEAD + b"ab"], ids=["nothing", "half a head", "a head", "less"])
def test_who_sends_no_whole_request_is_cut_off(sent: bytes, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_bytes_that_drip_win_no_time(address: tuple[str, int]) -> None:
    def drip() -> None:
        for byte in HEAD * 20:
            connection.sendall(bytes([byte]))
            time.sleep(PATIENCE_S / 20)

    with socket.create_connection(address, timeout=WAIT_S) as connection, pytest.raises(ConnectionError):
        drip()


def test_who_waits_for_answers_is_not_and_may_ask_again(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        for body in (b"once", b"more"):
            connection.sendall(HEAD + body)
            answer = b""
            while not answer.endswith(body):
                piece = connection.recv(4096)
                assert piece, "cut off while waiting"
                answer += piece
