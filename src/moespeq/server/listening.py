"""The address of a server: taken before anything slow is imported, so that one that cannot be had is told at once.

Who connects early waits until the server runs.
"""

from __future__ import annotations

import socket

from moespeq.errors import UsageError

__all__ = ["listen"]


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, whose connections send each piece at once; port 0 takes a free one.

    Raises UsageError where the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio does it only where proto is given
        return listening
    except (OSError, OverflowError, UnicodeError) as error:  # the last of a host that DNS cannot name
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"Cannot listen on {host} port {port}: {reason}; choose another --host or --port.") from error
