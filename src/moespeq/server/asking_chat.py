"""From a conversation to what the engine does: its prompt by the chat template, and how its answer is written and read.

Like `asking`, it finds what is wrong with a request before that queues, beside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.decode.text import TextStream
from moespeq.errors import UsageError
from moespeq.model.images import ImagePrompt
from moespeq.model.tokenizer import Tokenizer
from moespeq.server.answer_format import AnswerFormat, format_of
from moespeq.server.answer_reader import AnswerReader
from moespeq.server.asking import Asked, check_form_may_end, checked_prompt, sampling_of
from moespeq.server.call_grammar import calls_between_text, calls_or_json, only_calls
from moespeq.server.chat_protocol import ChatRequest, Message, Tool
from moespeq.server.failures import FieldError, about
from moespeq.server.generating import GenerationTask
from moespeq.server.grammar import Grammar, schema_of
from moespeq.server.image_source import ImageSource
from moespeq.server.protocol import ResponseFormat
from moespeq.server.service import Service
from moespeq.server.styles import ChatStyle

__all__ = ["ask_chat", "chat_prompt"]


def chat_prompt(
    service: Service, messages: list[Message], tools: list[Tool], variables: dict[str, Any]
) -> list[int] | ImagePrompt:
    """The prompt of a conversation. Raises UsageError for what the template refuses, where there is none, for images
    that are none, and where the context cannot hold it.
    """
    engine = service.worker.engine
    if not engine.tokenizer.has_chat_template:
        raise UsageError("This model has no chat template; send a 'prompt' to /v1/completions in place of 'messages'.")
    if taken := sorted(engine.tokenizer.reserved_variables & set(variables)):
        raise FieldError(f"'{taken[0]}' is not the chat template's own; leave it out.", "chat_template_kwargs")
    images = ImageSource(engine, service.fetch_image, service.image_memory)
    given, known = [message.for_template(images.read) for message in messages], [tool.for_template() for tool in tools]
    return engine.encode_chat(given, tools=known, most_tok=engine.plan.context_tok, variables=variables)


def ask_chat(service: Service, request: ChatRequest) -> Asked:
    """Raises UsageError for what is wrong with it."""
    engine, tools = service.worker.engine, request.usable_tools
    if request.top_logprobs is not None and not request.logprobs:
        raise FieldError("top_logprobs says how many, and logprobs whether; set logprobs to true.", "top_logprobs")
    with about("messages"):
        given = chat_prompt(service, request.messages, tools, request.chat_template_kwargs)
        tokens = checked_prompt(engine, given)
        prompt = given if isinstance(given, ImagePrompt) else tokens
    with about("tools"):
        written = format_of(engine.tokenizer, tokens, has_tools=bool(tools))
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    sampling = sampling_of(engine, request, _most_tokens(engine, request, len(prompt)), limit_name=limit_name)
    grammar = _grammar(service, request, tools, written)
    if request.must_call or _wanted(request):
        check_form_may_end(request)
    is_read = written is not None and (grammar is None or bool(tools))  # else JSON is all there is
    task = GenerationTask(
        (prompt,),
        sampling,
        request.n,
        num_top=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=grammar,
        sink=_shown_markers(engine, sampling) if is_read and written and written.has_special else None,
    )
    reader = _reader(engine.tokenizer, written if is_read else None, request, tools)
    return Asked(task, ChatStyle(engine.tokenizer, reader, has_logprobs=bool(request.logprobs)))


def _most_tokens(engine: Engine, request: ChatRequest, prompt_tok: int) -> int | None:
    """An answer without a limit, the checkpoint's own included, may fill the context."""
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if most is None and getattr(engine.generation_config, "max_new_tokens", None) is None:
        return engine.plan.context_tok - prompt_tok
    return most


def _wanted(request: ChatRequest) -> ResponseFormat | None:
    """The form of what is no call, where it has one."""
    given = request.response_format
    return None if given is None or given.type == "text" else given


def _grammar(service: Service, request: ChatRequest, tools: list[Tool], written: AnswerFormat | None) -> Grammar | None:
    wanted = _wanted(request)
    is_one_call = request.parallel_tool_calls is False
    strict = [tool for tool in tools if tool.function.strict]
    if not tools or not (request.must_call or wanted or strict):
        with about("response_format"):
            return None if wanted is None else service.grammars.compile(wanted)
    if written is None or not written.is_json:
        sentence = (
            "The form of a tool call can be enforced only where the model writes it as JSON; leave out tool_choice "
            "(but 'auto'), strict and response_format."
        )
        raise FieldError(sentence, "tool_choice" if request.must_call else "response_format" if wanted else "tools")
    with about("response_format"):
        schema = None if wanted is None else schema_of(wanted)
    with about("tools"):
        if request.must_call:
            source = only_calls(written, tools, is_one_call=is_one_call)
        elif schema is not None:
            source = calls_or_json(written, tools, schema, is_one_call=is_one_call)
        else:
            source = calls_between_text(written, tools)
        return service.grammars.compile_lark(source)


def _reader(
    tokenizer: Tokenizer, written: AnswerFormat | None, request: ChatRequest, tools: list[Tool]
) -> Callable[[], AnswerReader]:
    if written is None:
        return lambda: AnswerReader(None)
    given = [tool.for_template() for tool in tools]

    def reader() -> AnswerReader:
        parser = tokenizer.response_parser(written.template, prefix=written.prefix, tools=given)
        names = [tool.function.name for tool in tools]
        return AnswerReader(parser, names=names, is_one_call=request.parallel_tool_calls is False)

    return reader


def _shown_markers(engine: Engine, sampling: dict[str, Any]) -> Callable[[], TextStream]:
    """Texts in which special tokens are shown, those that end it left out."""
    params = engine.sampling_params(**sampling)
    return lambda: TextStream(engine.tokenizer, params.stop, skip_special_tokens=False, hidden=params.eos_token_ids)
