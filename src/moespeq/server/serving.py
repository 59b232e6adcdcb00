"""A service on a socket, until a signal or a failed load ends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from socket import socket

import uvicorn

from moespeq.server.app import create_app
from moespeq.server.ending import EndingServer
from moespeq.server.patience import PatientProtocol
from moespeq.server.service import Service

__all__ = ["HttpServer"]

_OF_THE_START = ("Started server process", "Waiting for application startup", "Application startup", "Uvicorn running")


class HttpServer:
    """Runs in the main thread, whose signals end it: answers that run have `grace_s` to end, then they are cut."""

    def __init__(self, service: Service, *, grace_s: int, cors_origins: Sequence[str]) -> None:
        logging.getLogger("uvicorn.access").addFilter(_without_looks)
        logging.getLogger("uvicorn.error").addFilter(_without_the_start)
        self._service = service
        self._server = EndingServer(
            uvicorn.Config(
                create_app(service, cors_origins=cors_origins),
                http=PatientProtocol,
                log_config=None,  # records go where the program's go
                server_header=False,
            ),
            service,
            grace_s=grace_s,
        )

    def run(self, listening: socket) -> None:
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


def _without_the_start(record: logging.LogRecord) -> bool:
    """Keeps out what reads as if the model were ready: the HTTP server runs while that is loaded."""
    return not str(record.msg).startswith(_OF_THE_START)
