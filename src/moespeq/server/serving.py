"""A service on a socket, until a signal or a failed load ends it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

import uvicorn

from moespeq.errors import UsageError
from moespeq.server.app import create_app
from moespeq.server.ending import EndingServer
from moespeq.server.service import Service

__all__ = ["HttpServer", "listen"]


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises UsageError where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"Cannot listen on {host} port {port}: {reason}; choose another --host or --port.") from error


class HttpServer:
    """Runs in the main thread, whose signals end it: answers that run have `grace_s` to end, then they are cut."""

    def __init__(self, service: Service, *, grace_s: int, cors_origins: Sequence[str]) -> None:
        logging.getLogger("uvicorn.access").addFilter(_without_looks)
        self._service = service
        self._server = EndingServer(
            uvicorn.Config(
                create_app(service, cors_origins=cors_origins),
                log_config=None,  # records go where the program's go
                server_header=False,
            ),
            service,
            grace_s=grace_s,
        )

    def run(self, listening: socket.socket) -> None:
        """Serve until a signal or `stop`. Raises what the load failed with."""
        try:
            self._server.run(sockets=[listening])
        finally:
            self._service.worker.close()
        if self._service.worker.failure is not None:
            raise self._service.worker.failure

    def stop(self) -> None:
        """End the server; from any thread."""
        self._server.should_exit = True


def _without_looks(record: logging.LogRecord) -> bool:
    """Keeps the live page out of the access log: it looks twice a second."""
    return not (isinstance(record.args, tuple) and str(record.args[2]).startswith("/live?"))
