"""Watches a running server: its health, its counters twice some seconds apart, and one answer scored twice.

The answer's tokens carry log-probabilities from the verify passes that decoded them; the same text sent back with
`echo` carries those of one prefill. Both are the target's over the same tokens, so they differ by rounding alone unless
the KV cache of decoded tokens is wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from moespeq.doctor.findings import Finding, fine, problem, warning
from moespeq.doctor.signals import Signals
from moespeq.doctor.snapshot import Snapshot, signals_between
from moespeq.errors import UsageError

__all__ = ["Watched", "is_local", "watch_server"]

_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 60.0  # of a busy server's queue no more than this is waited for
_ANSWER_TOK = 32
_MOST_BYTES = 16 << 20  # of one answer
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_OURS = "moespeq:"


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a server."""

    health: Finding
    signals: Signals


def is_local(url: str) -> bool:
    """Whether the server runs on this machine, whose facts are then its own."""
    return httpx.URL(url).host in _LOCAL_HOSTS


def watch_server(
    client: httpx.Client, *, prompt: str, watch_s: float, sleep: Callable[[float], None] = time.sleep
) -> Watched:
    """client: with the server's address and key. Raises UsageError where no server of ours answers."""
    health = _health(client)
    first = _scrape(client)
    sleep(watch_s)
    second = _scrape(client)
    gap, refusal = _echo_gap(client, prompt)
    if not second.acceptance.drafts:
        second = _scrape(client)  # nobody had asked it for anything before
    signals = signals_between(first, second, watch_s)
    return Watched(health, replace(signals, echo_logprob_gap=gap, echo_refusal=refusal))


def _health(client: httpx.Client) -> Finding:
    answer = _get(client, "/health")
    try:
        status = answer.json()
        state = str(status["status"])
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(_NOT_OURS.format(client.base_url)) from error
    match state:
        case "ok":
            return fine("health", "the server is ready")
        case "loading":
            told = f"the model is being loaded, {status.get('done_bytes')} of {status.get('total_bytes')} bytes"
            return warning(
                "health", told, "requests are answered with 503 until then", "run doctor again when it is ready"
            )
        case _:
            cause = "the engine failed on the last three requests or more"
            return problem(
                "health", f"the server says it is {state}", cause, "look into the server's log, then restart it"
            )


def _scrape(client: httpx.Client) -> Snapshot:
    text = _get(client, "/metrics").text
    try:
        families = [one for one in text_string_to_metric_families(text) if one.name.startswith(_OURS)]
    except ValueError as error:
        raise UsageError(_NOT_OURS.format(client.base_url)) from error
    if not families:
        raise UsageError(_NOT_OURS.format(client.base_url))
    samples = [sample for family in families for sample in family.samples]
    for sample in samples:
        if not 0 <= sample.value < math.inf:
            raise UsageError(
                f"{client.base_url} counts {sample.value:g} of {sample.name}, which cannot be; look into its log, and "
                "at what stands between it and doctor."
            )
    return Snapshot.of([(one.name.removeprefix(_OURS), one.labels, one.value) for one in samples])


def _get(client: httpx.Client, path: str) -> httpx.Response:
    try:
        return _ask(client, "GET", path, _TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last of a host that DNS cannot name
        reason = str(error) or type(error).__name__
        raise UsageError(f"No server answers at {client.base_url} ({reason}); check --server.") from error


def _ask(
    client: httpx.Client, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
) -> httpx.Response:
    """The whole answer, within `timeout_s` however slowly it trickles: httpx's own limit is that of one read.

    Raises httpx.HTTPError.
    """
    told: Future[httpx.Response] = Future()

    def ask() -> None:
        try:
            told.set_result(_read(client, method, path, timeout_s, body))
        except Exception as error:
            told.set_exception(error)

    Thread(target=ask, daemon=True).start()  # one that still waits does not keep the process
    try:
        return told.result(timeout_s)
    except TimeoutError as error:
        raise httpx.ReadTimeout(f"no whole answer in {timeout_s:g} s") from error


def _read(
    client: httpx.Client, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None
) -> httpx.Response:
    content = bytearray()
    with client.stream(method, path, json=body, timeout=timeout_s) as answer:
        for piece in answer.iter_bytes():
            content += piece
            if len(content) > _MOST_BYTES:
                raise httpx.ReadError(f"an answer of more than {_MOST_BYTES} bytes")
    return httpx.Response(answer.status_code, content=bytes(content), request=answer.request)


_NOT_OURS = "What answers at {} is no moespeq server; check --server."


def _echo_gap(client: httpx.Client, prompt: str) -> tuple[float | None, str | None]:
    """The largest difference of log-probabilities in nats, or why there is none."""
    try:
        model = _json(_ask(client, "GET", "/v1/models", _TIMEOUT_S))["data"][0]["id"]
        asked = {"model": model, "temperature": 0.0, "logprobs": 1, "seed": 0}
        answer = _complete(client, asked | {"prompt": prompt, "max_tokens": _ANSWER_TOK, "ignore_eos": True})
        echoed = _complete(client, asked | {"prompt": prompt + answer["text"], "max_tokens": 0, "echo": True})
        return _largest_gap(answer["logprobs"], echoed["logprobs"], len(prompt)), None
    except httpx.TimeoutException:
        return None, f"a test request was not answered in {_ANSWER_TIMEOUT_S:g} s"
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return None, f"a test request was refused ({str(error) or type(error).__name__})"


def _complete(client: httpx.Client, body: Mapping[str, Any]) -> dict[str, Any]:
    told = _ask(client, "POST", "/v1/completions", _ANSWER_TIMEOUT_S, body)
    answer: dict[str, Any] = _json(told)["choices"][0]
    return answer


def _json(answer: httpx.Response) -> Any:
    """Raises ValueError with the server's own sentence where it refused."""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        has_key = "authorization" in answer.request.headers
        raise ValueError(
            "the server takes another key than this --api-key" if has_key else "give the server's --api-key"
        )
    body = answer.json()
    if answer.is_error:
        raise ValueError(body["error"]["message"].rstrip("."))
    return body


def _largest_gap(answer: Mapping[str, Any], echoed: Mapping[str, Any], prompt_chars: int) -> float:
    """Over tokens of the answer that the tokenizer makes of its text again; ValueError where there are none."""
    scored = zip(echoed["text_offset"], echoed["tokens"], echoed["token_logprobs"], strict=True)
    again = [(token, logprob) for offset, token, logprob in scored if offset >= prompt_chars]
    gaps: list[float] = []
    for (token, logprob), name, first in zip(again, answer["tokens"], answer["token_logprobs"], strict=False):
        if token != name:
            break
        gaps.append(abs(logprob - first))
    if not gaps:
        raise ValueError("its answer reads as other tokens")
    return max(gaps)
