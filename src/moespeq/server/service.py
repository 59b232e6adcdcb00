"""What all routes share: the worker, who may ask, and how a task becomes a reply.

Owns nothing of the engine: what it reads of it (tokenizer, plan, defaults) never changes.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from moespeq.decode.engine import Engine
from moespeq.ports import Clock
from moespeq.server.failures import AuthenticationError, UnknownModelError
from moespeq.server.feed import events_of, server_sent
from moespeq.server.generating import ChoiceEnd, ChoicePiece, Event, GenerationTask, PromptEcho
from moespeq.server.grammar import GrammarCompiler
from moespeq.server.history import RoundHistory
from moespeq.server.image_source import Fetch, ImageMemory
from moespeq.server.metrics import ServerMetrics
from moespeq.server.styles import Style
from moespeq.server.worker import EngineWorker

__all__ = ["LoadProgress", "Service", "Usage"]

_NOT_BUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class LoadProgress:
    """How far the model is loaded, a ProgressSink; written by the worker's thread, read by the event loop."""

    done_bytes: int = 0
    total_bytes: int = 0
    what: str = "loading the model"

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        self.done_bytes, self.total_bytes, self.what = done_bytes, total_bytes, what


@dataclass(slots=True)
class Usage:
    """Tokens of one request. cached_tok: of its prompts, those that needed no prefill."""

    prompt_tok: int
    new_tok: int = 0
    cached_tok: int = 0

    def count(self, event: Event) -> None:
        """What `event` adds."""
        if isinstance(event, ChoicePiece):
            self.new_tok += len(event.tokens)
        if isinstance(event, ChoiceEnd):
            self.cached_tok += event.cached_tok

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tok,
            "completion_tokens": self.new_tok,
            "total_tokens": self.prompt_tok + self.new_tok,
            "prompt_tokens_details": {"cached_tokens": self.cached_tok},
        }


@dataclass(frozen=True)
class Service:
    """One served model. api_key: None lets everybody ask; fetch_image: None lets nobody send images by address."""

    worker: EngineWorker[Engine]
    metrics: ServerMetrics
    clock: Clock
    model_name: str
    api_key: str | None = None
    progress: LoadProgress = field(default_factory=LoadProgress)
    fetch_image: Fetch | None = None
    image_memory: ImageMemory = field(default_factory=ImageMemory)
    history: RoundHistory = field(default_factory=RoundHistory)
    created_s: int = field(default_factory=lambda: int(time.time()))

    async def authorize(self, request: Request) -> None:
        """A dependency of routes. Raises AuthenticationError unless the request carries the key, where there is one."""
        if self.api_key is None:
            return
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secrets.compare_digest(key.encode("latin-1"), self.api_key.encode()):
            raise AuthenticationError("This server wants its API key, as 'Authorization: Bearer KEY'; send it.")

    def check_model(self, name: str) -> None:
        """Raise UnknownModelError for another model than the one that is served."""
        if name != self.model_name:
            sentence = f"The model '{name:.100}' is not served here; ask for '{self.model_name}'."
            raise UnknownModelError(sentence, "model")

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """Made when the first answer needs one."""
        engine = self.worker.engine
        ends = engine.sampling_params().eos_token_ids
        return GrammarCompiler(engine.tokenizer.definition, engine.vocab_size, ends)

    async def reply(
        self, request: Request, task: GenerationTask, style: Style, *, is_streamed: bool, has_usage: bool
    ) -> Response:
        """Queue `task` and answer. A status is sent after the first event, so that a failure has its own."""
        arrived_s = self.clock.now_s()
        usage = Usage(sum(map(len, task.prompts)))
        header = {"id": f"{style.id_prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model_name}
        events = events_of(self.worker, task.turns(self.metrics, self.clock, arrived_s), request)
        if not is_streamed:
            choices = await _collect(events, style, usage)
            rest = _written({**header, "object": style.name, "usage": usage.to_json()})
            whole = rest.removesuffix(b"}") + b',"choices":[' + b",".join(choices) + b"]}"
            return Response(whole, media_type="application/json")
        first = await anext(events)
        chunks = _chunks(first, events, style, usage, has_usage=has_usage)
        stamped = ({**header, "object": style.chunk_name, **chunk} async for chunk in chunks)
        return StreamingResponse(server_sent(stamped), media_type="text/event-stream", headers=_NOT_BUFFERED)


def _written(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _collect(events: AsyncIterator[Event], style: Style, usage: Usage) -> list[bytes]:
    """Whole choices as JSON, each written by itself: no other thread runs while one is."""
    by_choice: dict[int, list[Event]] = {}
    async for event in events:
        by_choice.setdefault(event.index, []).append(event)
        usage.count(event)

    def written(index: int) -> bytes:
        return _written(style.whole(index, by_choice.pop(index)))

    return [await run_in_threadpool(written, index) for index in sorted(by_choice)]


async def _chunks(
    first: Event, events: AsyncIterator[Event], style: Style, usage: Usage, *, has_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Chunks without their header. With usage, all have the field, and the last one has nothing else."""
    nothing: dict[str, Any] = {"usage": None} if has_usage else {}
    opened: set[int] = set()

    async def choices(event: Event) -> list[dict[str, Any]]:
        usage.count(event)
        opening = None if event.index in opened else style.opening(event.index)
        opened.add(event.index)
        is_long = isinstance(event, PromptEcho)
        delta = await run_in_threadpool(style.delta, event) if is_long else style.delta(event)
        return [choice for choice in (opening, delta) if choice is not None]

    for choice in await choices(first):
        yield {"choices": [choice], **nothing}
    async for event in events:
        for choice in await choices(event):
            yield {"choices": [choice], **nothing}
    if has_usage:
        yield {"choices": [], "usage": usage.to_json()}
