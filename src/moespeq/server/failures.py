"""Errors as HTTP says them: a status, OpenAI's JSON body, and when to ask again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from moespeq.errors import BudgetError, MoespeqError, OverloadError, UnavailableError, UsageError
from moespeq.server.wording import invalid, no_such_path, wrong_method

__all__ = [
    "COME_BACK_S",
    "AuthenticationError",
    "ClientGoneError",
    "EngineFaultError",
    "FieldError",
    "UnknownModelError",
    "about",
    "add_error_handlers",
    "error_answer",
    "error_body",
    "explained",
]

_log = logging.getLogger(__name__)
_CLIENT_GONE = 499  # nobody reads it; as web servers log it
COME_BACK_S = 5  # where nobody knows how long it takes
_OUR_BUG = "The server failed on this request, and its log says how; please report it."


class AuthenticationError(UsageError):
    """The request carries no key, or a wrong one."""


class FieldError(UsageError):
    """What is wrong is a field of the request, named as the API does; None where it is the body itself."""

    def __init__(self, sentence: str, field: str | None) -> None:
        super().__init__(sentence)
        self.field = field


@contextmanager
def about(field: str) -> Iterator[None]:
    """What a client did wrong herein is wrong with `field`, where nothing closer is told."""
    try:
        yield
    except FieldError:
        raise
    except UsageError as error:
        raise FieldError(str(error), field) from error


class UnknownModelError(FieldError):
    """The request names a model that is not served."""


class ClientGoneError(MoespeqError):
    """The client left before its answer was complete."""


class EngineFaultError(MoespeqError):
    """The engine failed on a request with an error that nobody wrote a sentence for."""


# The first that an error is an instance of: status, OpenAI's type, and code.
_STATUSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (AuthenticationError, 401, "authentication_error", "invalid_api_key"),
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UsageError, 400, "invalid_request_error", None),
    (OverloadError, 429, "rate_limit_error", "queue_full"),
    (UnavailableError, 503, "server_error", "unavailable"),
    (BudgetError, 503, "server_error", "out_of_memory"),
    (ClientGoneError, _CLIENT_GONE, "invalid_request_error", None),
    (EngineFaultError, 500, "server_error", "engine_fault"),
    (MoespeqError, 500, "server_error", None),
)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body. An error that nobody wrote a sentence for is our bug, and its words stay in the log."""
    for kind, status, name, code in _STATUSES:
        if isinstance(error, kind):
            return status, _body(str(error), name, code, error.field if isinstance(error, FieldError) else None)
    return 500, _body(_OUR_BUG, "server_error", "internal_error")


def explained(error: BaseException) -> MoespeqError:
    """`error` as a client may see it; what no sentence was written for goes to the log, with its traceback."""
    if isinstance(error, MoespeqError):
        return error
    _log.error("The engine failed on a request.", exc_info=error)
    return EngineFaultError(_OUR_BUG)


def add_error_handlers(app: FastAPI) -> None:
    """Let every failure of `app` leave in one form."""
    app.add_exception_handler(MoespeqError, error_answer)
    app.add_exception_handler(Exception, error_answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)


async def error_answer(_: Request, error: Exception) -> JSONResponse:
    """What a client gets instead of an answer."""
    status, body = error_body(error)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(error.retry_after_s if isinstance(error, UnavailableError) else COME_BACK_S)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


async def _answer_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # all of the query: bodies are read by us
    sentence, field = invalid(errors, dict(request.query_params))
    return JSONResponse(_body(sentence, "invalid_request_error", None, field), 400)


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    match status:
        case 404:
            sentence = no_such_path(path)
        case 405:
            sentence = wrong_method(path, request.method, (error.headers or {}).get("Allow", "another method"))
        case _:
            sentence = str(error.detail)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(_body(sentence, kind, None), status, error.headers)


def _body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": _sendable(message), "type": kind, "param": param and _sendable(param), "code": code}}


def _sendable(text: str) -> str:
    """Half a character, which a client can write in JSON, is shown as it was written: no text can hold it."""
    return text.encode(errors="backslashreplace").decode()
