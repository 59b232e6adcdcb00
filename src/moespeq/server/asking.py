"""From what a client asked to complete to what the engine does: prompts as tokens, sampling options by our names.

Everything that can be wrong with a request is found here, before it queues. These functions encode and compile, so they
run beside the event loop and not on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.errors import PromptError, PromptLengthError, UsageError
from moespeq.model.images import ImagePrompt
from moespeq.server.failures import FieldError, about
from moespeq.server.generating import GenerationTask, check_sampling
from moespeq.server.protocol import CompletionRequest, GenerationRequest
from moespeq.server.service import Service
from moespeq.server.styles import CompletionStyle, Style
from moespeq.server.wording import in_api_words

__all__ = ["Asked", "ask_completion", "check_form_may_end", "checked_prompt", "sampling_of"]

_API_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")},
    "min_new_tokens": "min_tokens",
}
"""What clients call the engine's sampling options."""
_COMPLETION_TOK = 16  # OpenAI's default
_MOST_PROMPTS = 256
_MOST_ECHOED = 1_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, understood."""

    task: GenerationTask
    style: Style


def ask_completion(service: Service, request: CompletionRequest) -> Asked:
    """Raises UsageError for what is wrong with it."""
    engine = service.worker.engine
    with about("prompt"):
        given = _prompts(request.prompt)
        prompts = tuple(checked_prompt(engine, prompt) for prompt in given)
    _check_echo(request, prompts)
    max_tokens = _COMPLETION_TOK if request.max_tokens is None else request.max_tokens
    is_only_echo = request.echo and max_tokens == 0
    checked = sampling_of(engine, request, 1 if is_only_echo else max_tokens)
    sampling = None if is_only_echo else checked
    wanted = request.response_format
    with about("response_format"):
        grammar = None if wanted is None or wanted.type == "text" else service.grammars.compile(wanted)
    if grammar is not None:
        check_form_may_end(request)
    texts = [_text(engine, prompt) for prompt in given] if request.echo else []
    task = GenerationTask(prompts, sampling, request.n, echo=request.echo, num_top=request.logprobs, grammar=grammar)
    style = CompletionStyle(
        engine.tokenizer,
        prompt_texts=texts,
        prompts=prompts,
        n=request.n,
        has_logprobs=request.logprobs is not None,
    )
    return Asked(task, style)


def check_form_may_end(request: GenerationRequest) -> None:
    """Raise UsageError for what forbids the end of an answer where its form wants it."""
    if request.ignore_eos or request.min_tokens:
        name = "ignore_eos" if request.ignore_eos else "min_tokens"
        sentence = f"An answer of a given form ends where the form does, so {name} cannot hold; leave it out."
        raise FieldError(sentence, name)


def _check_echo(request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raise UsageError where prompts that are given back, once a choice, would fill the memory."""
    if not request.echo:
        return
    numbers_a_token = 1 if request.logprobs is None else 2 + request.logprobs
    numbers = request.n * numbers_a_token * sum(map(len, prompts))
    if numbers > _MOST_ECHOED:
        sentence = (
            f"The prompts would come back as {numbers} tokens and log-probabilities, and may as {_MOST_ECHOED}; send "
            "fewer prompts at once, or ask for fewer choices or logprobs."
        )
        raise FieldError(sentence, "echo")


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


def _ids(engine: Engine, prompt: str | list[int] | ImagePrompt) -> str | list[int] | ImagePrompt:
    """A text's tokens; an empty one is the engine's to refuse."""
    if isinstance(prompt, str) and prompt:
        return engine.tokenizer.encode(prompt, most_tok=engine.plan.context_tok)
    return prompt


def _text(engine: Engine, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt, skip_special_tokens=False)


def checked_prompt(engine: Engine, prompt: str | list[int] | ImagePrompt) -> tuple[int, ...]:
    """The tokens of `prompt`. Raises PromptError where the engine would refuse them."""
    try:
        return tuple(engine.encode(_ids(engine, prompt)))
    except PromptLengthError as error:
        raise PromptError(
            f"The prompt has {error.prompt_tok} tokens and the context {error.context_tok}, one of which the answer "
            f"needs; shorten the prompt, or start the server with a larger --ctx-size."
        ) from None


def sampling_of(
    engine: Engine, request: GenerationRequest, max_tokens: int | None, *, limit_name: str = "max_tokens"
) -> dict[str, Any]:
    """Fields of SamplingParams; None is not given. Raises UsageError for what the engine would refuse.

    limit_name: what the client called `max_tokens`.
    """
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
    try:
        check_sampling(engine, sampling)
    except UsageError as error:
        sentence, field = in_api_words(str(error), _API_NAMES | {"max_new_tokens": limit_name})
        raise (FieldError(sentence, field) if field else error) from None
    return sampling
