"""Bodies of requests are read whole, so none may be longer than what the longest sensible request takes."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moespeq.config import format_bytes

__all__ = ["BodyLimit"]

_MOST_BYTES = 8 << 20  # 256 prompts of 4 thousand token ids


class BodyLimit:
    """Middleware under which reading a body that is announced, or turns out, to be longer ends with 413."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        announced = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        is_too_long = announced.isdecimal() and int(announced) > _MOST_BYTES
        read_bytes = 0

        async def limited() -> Message:
            nonlocal read_bytes
            message = await receive()
            read_bytes += len(message.get("body", b""))
            if is_too_long or read_bytes > _MOST_BYTES:
                raise HTTPException(413, f"A request may hold {format_bytes(_MOST_BYTES)}; send fewer prompts at once.")
            return message

        await self._app(scope, limited, send)
