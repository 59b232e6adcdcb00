"""The endpoints: each is a line or two that asks, queues and answers. Their meaning is in the modules they call."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from moespeq import __version__
from moespeq.decode.engine import Engine
from moespeq.errors import UsageError
from moespeq.model.images import ImagePrompt
from moespeq.server.asking import Asked, ask_completion
from moespeq.server.asking_chat import ask_chat, chat_prompt
from moespeq.server.bodies import beside_the_loop, body_of
from moespeq.server.chat_protocol import ChatRequest, TokenizeRequest
from moespeq.server.failures import COME_BACK_S, FieldError, about
from moespeq.server.protocol import CompletionRequest, DetokenizeRequest, GenerationRequest
from moespeq.server.service import Service
from moespeq.server.worker import WorkerState

__all__ = ["model_routes", "state_routes"]

Completion = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]
Chat = Annotated[ChatRequest, Depends(body_of(ChatRequest))]
Text = Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))]
Tokens = Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))]


def state_routes(service: Service) -> APIRouter:
    """How the server is. Open to everybody: probes and scrapers carry no key."""
    routes = APIRouter()

    @routes.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """200 while requests are served as they should be; else 503, with the progress of the load."""
        worker, progress, come_back = service.worker, service.progress, {"Retry-After": str(COME_BACK_S)}
        if worker.state is WorkerState.LOADING:
            done = {"done_bytes": progress.done_bytes, "total_bytes": progress.total_bytes}
            return JSONResponse({"status": "loading", "what": progress.what, **done}, 503, come_back)
        if not worker.is_healthy:
            return JSONResponse({"status": "unhealthy"}, 503, come_back)
        return JSONResponse({"status": "ok"})

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/metrics")
    async def metrics() -> PlainTextResponse:
        if service.worker.state is WorkerState.READY:
            service.metrics.describe(service.worker.engine, service.model_name)
        return PlainTextResponse(service.metrics.to_text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def model_routes(service: Service) -> APIRouter:
    """What the model does. With the API key, where there is one."""
    routes = APIRouter(dependencies=[Depends(service.authorize)])

    async def answer(request: Request, asked: Asked, body: GenerationRequest) -> Response:
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        return await service.reply(request, asked.task, asked.style, is_streamed=body.stream, has_usage=has_usage)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model_card(service)

    @routes.post("/v1/completions")
    async def completions(request: Request, body: Completion) -> Response:
        service.check_model(body.model)
        return await answer(request, await beside_the_loop(ask_completion, service, body), body)

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: Chat) -> Response:
        service.check_model(body.model)
        return await answer(request, await beside_the_loop(ask_chat, service, body), body)

    @routes.post("/tokenize")
    async def tokenize(body: Text) -> dict[str, Any]:
        tokens = await beside_the_loop(_tokens, service, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.worker.engine.plan.context_tok}

    @routes.post("/detokenize")
    async def detokenize(body: Tokens) -> dict[str, str]:
        return {"prompt": await beside_the_loop(_text, service.worker.engine, body)}

    return routes


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "moespeq",
        "max_model_len": service.worker.engine.plan.context_tok,
    }


def _tokens(service: Service, body: TokenizeRequest) -> list[int]:
    engine = service.worker.engine
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("Give either a 'prompt' or 'messages' to tokenize.")
    if body.messages is not None:
        with about("messages"):
            prompt = chat_prompt(service, body.messages, body.tools or [], body.chat_template_kwargs)
            return list(prompt.tokens) if isinstance(prompt, ImagePrompt) else prompt
    with about("prompt"):
        return engine.tokenizer.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens, most_tok=engine.plan.context_tok
        )


def _text(engine: Engine, body: DetokenizeRequest) -> str:
    bad = next((token for token in body.tokens if not 0 <= token < engine.vocab_size), None)
    if bad is not None:
        sentence = f"Token {bad} is not in the vocabulary of {engine.vocab_size}; check the tokenizer."
        raise FieldError(sentence, "tokens")
    return engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
