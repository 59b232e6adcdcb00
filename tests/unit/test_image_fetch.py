"""The server fetches images from listed hosts alone, within size and time, and from no address inside the network."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moespeq.errors import UsageError
from moespeq.server.image_fetch import ImageFetcher
from moespeq.transfer.clock import MonotonicClock

BODY = bytes(range(256)) * 4


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/image")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        assert self.headers["Host"].startswith("127.0.0.1:")
        if self.path == "/slow":
            for _ in range(20):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        self.wfile.write(BODY)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client had enough
            super().handle()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def _fetch(url: str, *hosts: str, most_bytes: int = 4096, timeout_s: float = 5) -> bytes:
    return ImageFetcher(hosts, most_bytes=most_bytes, timeout_s=timeout_s, clock=MonotonicClock())(url)


def test_a_listed_host_is_asked(port: int) -> None:
    assert _fetch(f"http://127.0.0.1:{port}/image", "127.0.0.1") == BODY


@pytest.mark.parametrize(
    ("path", "options", "sentence"),
    [
        ("/moved", {}, r"answers 302 for an image, and 200 is needed; redirects are not followed"),
        ("/none", {}, "answers 404"),
        ("/image", {"most_bytes": 1000}, r"has more than 1000 B; send a smaller one\.$"),
        ("/slow", {"timeout_s": 0.2}, r"did not come within 0\.2 s; send it as a data URL\.$"),
    ],
)
def test_what_is_not_there_too_large_or_too_slow_is_one_sentence(
    port: int, path: str, options: dict[str, float], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        _fetch(f"http://127.0.0.1:{port}{path}", "127.0.0.1", **options)  # type: ignore[arg-type]


def test_another_host_than_those_listed_is_not_asked(port: int) -> None:
    with pytest.raises(UsageError, match=r"^Images of 127\.0\.0\.1 are not fetched here"):
        _fetch(f"http://127.0.0.1:{port}/image", "images.example")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.0.0.1", "192.168.1.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"],
)
def test_every_host_means_public_ones(port: int, host: str) -> None:
    with pytest.raises(UsageError, match=r"which is no public address, are not fetched"):
        _fetch(f"http://{host}:{port}/image", "*")


@pytest.mark.parametrize("url", ["http://", "http://[", "http://host:99999999/", "https://a b/"])
def test_an_address_that_is_none_is_one_sentence(url: str) -> None:
    with pytest.raises(UsageError):
        _fetch(url, "*")


def test_nobody_listening_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"cannot be fetched \(ConnectError\); send it as a data URL\.$"):
        _fetch("http://127.0.0.1:1/", "127.0.0.1")
