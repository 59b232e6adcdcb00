"""From the bytes of a request to what it asks, checked for its shape: the way of every endpoint that has a body.

A body is read once its sender has shown the key. It is parsed and checked beside the event loop, but by C code that
lets no other thread run meanwhile. So its size is bounded (`body_limit`), its lists and objects are counted before they
are made, and of a list's items and of unknown fields the first error is the only one looked for (`protocol`).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from moespeq.errors import UsageError
from moespeq.server.failures import ClientGoneError, FieldError
from moespeq.server.protocol import Strict
from moespeq.server.wording import invalid, no_json

__all__ = ["beside_the_loop", "body_of"]

Given = ParamSpec("Given")
Result = TypeVar("Result")
Body = TypeVar("Body", bound=Strict)

_MOST_BRACKETS = 500_000  # beyond, the garbage collector's visits take seconds


async def beside_the_loop(call: Callable[Given, Result], *given: Given.args, **named: Given.kwargs) -> Result:
    """What `call`, which looks at what a client sent, returns from another thread."""
    try:
        return await run_in_threadpool(call, *given, **named)
    except RecursionError:
        raise UsageError("The request is nested too deep to be read; send a flatter one.") from None


def body_of(kind: type[Body]) -> Callable[[Request], Awaitable[Body]]:
    """A dependency of a route: the body as a `kind`. It raises UsageError for what is none."""

    async def read(request: Request) -> Body:
        if not _says_json(request.headers.get("Content-Type", "")):
            raise UsageError("The request does not say that its body is JSON; add 'Content-Type: application/json'.")
        try:
            raw = await request.body()
        except ClientDisconnect:
            raise ClientGoneError("The client left before its request was complete.") from None
        return await beside_the_loop(_checked, kind, raw)

    return read


def _says_json(content_type: str) -> bool:
    """A page of another origin, open in a browser beside the server, may send any text, but not as JSON unasked."""
    named = content_type.partition(";")[0].strip().lower()
    return named == "application/json" or (named.startswith("application/") and named.endswith("+json"))


def _checked(kind: type[Body], raw: bytes) -> Body:
    given = _parsed(raw)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise FieldError(*invalid(error.errors(include_url=False), given)) from None


def _parsed(raw: bytes) -> Any:
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > _MOST_BRACKETS:
        raise UsageError(f"The body has {brackets} opening brackets, and may have {_MOST_BRACKETS}; send less at once.")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise UsageError(no_json(error)) from None
