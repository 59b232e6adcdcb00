"""From what a client asked to what the engine does: prompts as tokens, sampling options by our names, a grammar.

Everything that can be wrong with a request is found here, before it queues. These functions encode and compile, so they
run beside the event loop and not on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.errors import PromptError, UsageError
from moespeq.server.generating import GenerationTask, check_sampling
from moespeq.server.grammar import Grammar
from moespeq.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message
from moespeq.server.service import Service
from moespeq.server.styles import ChatStyle, CompletionStyle, Style

__all__ = ["Asked", "ask_chat", "ask_completion", "messages_of"]

_COMPLETION_TOK = 16  # OpenAI's default
_MOST_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, understood."""

    task: GenerationTask
    style: Style


def ask_completion(service: Service, request: CompletionRequest) -> Asked:
    """Raises UsageError for what is wrong with it."""
    engine = service.worker.engine
    given = _prompts(request.prompt)
    prompts = tuple(tuple(engine.encode(prompt)) for prompt in given)
    max_tokens = _COMPLETION_TOK if request.max_tokens is None else request.max_tokens
    sampling = None if request.echo and max_tokens == 0 else _sampling(engine, request, max_tokens)
    texts = [_text(engine, prompt) for prompt in given] if request.echo else []
    task = GenerationTask(
        prompts, sampling, request.n, echo=request.echo, num_top=request.logprobs, grammar=_grammar(service, request)
    )
    style = CompletionStyle(
        engine.tokenizer,
        prompt_texts=texts,
        prompts=prompts,
        n=request.n,
        has_logprobs=request.logprobs is not None,
    )
    return Asked(task, style)


def ask_chat(service: Service, request: ChatRequest) -> Asked:
    """Raises UsageError for what is wrong with it."""
    engine = service.worker.engine
    if request.top_logprobs is not None and not request.logprobs:
        raise UsageError("top_logprobs says how many, and logprobs whether; set logprobs to true.")
    prompt = tuple(engine.encode(engine.tokenizer.encode_chat(messages_of(request.messages))))
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if max_tokens is None and getattr(engine.generation_config, "max_new_tokens", None) is None:
        max_tokens = engine.plan.context_tok - len(prompt)
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    task = GenerationTask(
        (prompt,),
        _sampling(engine, request, max_tokens),
        request.n,
        num_top=num_top,
        grammar=_grammar(service, request),
    )
    return Asked(task, ChatStyle(engine.tokenizer, has_logprobs=bool(request.logprobs)))


def messages_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """A conversation as chat templates take it."""
    return [
        {"role": message.role, "content": message.text} | ({"name": message.name} if message.name else {})
        for message in messages
    ]


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or many. A list of numbers is one."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise PromptError("The prompt is empty; give at least one character.")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if len(prompt) > _MOST_PROMPTS:
        raise PromptError(f"A request may hold {_MOST_PROMPTS} prompts, got {len(prompt)}; send several requests.")
    return [one for one in prompt if not isinstance(one, int)]


def _text(engine: Engine, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt, skip_special_tokens=False)


def _sampling(engine: Engine, request: GenerationRequest, max_tokens: int | None) -> dict[str, Any]:
    """Fields of SamplingParams; None is not given."""
    sampling = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "seed": request.seed,
        "stop": ((request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())) or None,
        "ignore_eos": request.ignore_eos,
    }
    check_sampling(engine, sampling)
    return sampling


def _grammar(service: Service, request: GenerationRequest) -> Grammar | None:
    wanted = request.response_format
    return None if wanted is None or wanted.type == "text" else service.grammars.compile(wanted)
