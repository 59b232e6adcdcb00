"""The checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.chat_parsing import ResponseParser

from moespeq.errors import CheckpointError, PromptError, UsageError
from moespeq.model.loading import one_line

__all__ = ["AnswerParser", "Tokenizer", "check_utf8"]


class AnswerParser(ResponseParser):  # type: ignore[misc]
    """transformers' parser of an answer that grows; it also says whether calls are JSON as the standard has it."""

    def __init__(self, template: Mapping[str, Any], *, prefix: str, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(dict(template), prefix=prefix, tools=list(tools))
        calls = template["fields"].get("tool_calls", {})
        self.has_json_calls = calls.get("content") == "json" and not calls.get("content_args", {}).get("string_delims")


class Tokenizer:
    """Text to tokens and back; a thin face over transformers' tokenizer, so that nothing else knows it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer in `folder`, None where there is none. Raises CheckpointError when it is damaged."""
        if not any(
            (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        ):
            return None
        try:
            return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(f"The tokenizer in {folder} cannot be loaded: {one_line(error)}") from error

    @property
    def definition(self) -> str:
        """The text of its tokenizer.json, which other libraries read. Raises UsageError where it has none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError("This checkpoint's tokenizer is not a fast one, which answers in a format need.")
        text: str = backend.to_str()
        return text

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, of a chat model often a turn."""
        token: int | None = getattr(self._tokenizer, "eos_token_id", None)
        return token

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation becomes a prompt."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tok: int | None = None) -> list[int]:
        """Tokens of a plain prompt, with the special tokens the model was trained with unless told otherwise.

        most_tok: a text that is surely longer is refused unread, by its characters: reading it would take long.
        """
        return self._encode(text, add_special_tokens=add_special_tokens, most_tok=most_tok)

    @cached_property
    def longest_token_chars(self) -> int:
        """No token stands for more characters than the longest one is written with."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; empty where it has none."""
        template = getattr(self._tokenizer, "chat_template", None)
        return template if isinstance(template, str) else json.dumps(template or "")

    @cached_property
    def reserved_variables(self) -> frozenset[str]:
        """Names that are no variables of a chat template: options of its rendering, and what that gives it itself."""
        options = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset(options) - {"documents", "kwargs"} | {"self", "messages"}

    def token(self, token_id: int) -> str:
        """How a token is written."""
        text: str = self._tokenizer.convert_ids_to_tokens(token_id)
        return text

    @property
    def special_tokens(self) -> Sequence[str]:
        """Tokens that `decode` leaves out unless told otherwise, as they are written."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return list(dict.fromkeys([*self._tokenizer.all_special_tokens, *(str(one) for one in added if one.special)]))

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How answers are to be parsed, where the tokenizer says so; see transformers' response templates."""
        template: Mapping[str, Any] | None = getattr(self._tokenizer, "response_template", None)
        return template

    def response_parser(
        self, template: Mapping[str, Any], *, prefix: str, tools: Sequence[dict[str, Any]]
    ) -> AnswerParser:
        """A parser of one answer that grows, behind what of it the prompt wrote already."""
        return AnswerParser(template, prefix=prefix, tools=tools)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        most_tok: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation by the model's chat template, ready for the assistant's answer.

        most_tok: as for `encode`. tools, variables: as for `render_chat`.
        """
        text = self.render_chat(messages, tools=tools, variables=variables)
        return self._encode(text, add_special_tokens=False, most_tok=most_tok)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The same as text. A content is text, or a list of parts where the template takes those.

        variables: those that this model's template knows beside messages and tools; none of `reserved_variables`, with
        which a stranger could bring a template of his own.
        """
        given = variables or {}
        assert self.reserved_variables.isdisjoint(given), "the caller refuses these in his own words"
        if not self.has_chat_template:
            raise UsageError("This model has no chat template; use a plain prompt instead, with `moespeq run`.")
        _check_messages(messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **given
            )
        except Exception as error:  # A template is a program: it may raise anything about the messages.
            raise UsageError(f"The chat template refuses these messages ({one_line(error)}); change them.") from error
        return text

    def _encode(self, text: str, *, add_special_tokens: bool, most_tok: int | None) -> list[int]:
        if most_tok is not None and len(text) > most_tok * self.longest_token_chars:
            raise PromptError(
                f"The prompt has {len(text)} characters, which cannot be {most_tok} tokens or fewer, as many as the "
                "context holds; shorten the prompt, or take a larger --ctx-size."
            )
        check_utf8("prompt", text)
        return [int(token) for token in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Text of `ids`, spaces untouched."""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def check_utf8(what: str, text: str) -> None:
    """Raise PromptError for bytes of a command line or file that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"The {what} is not valid UTF-8 at character {error.start}; convert it first.") from None


def _check_messages(messages: object) -> None:
    """Raise UsageError for anything but a conversation: templates turn the rest into tracebacks or nonsense."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UsageError(f"A chat needs a list of at least one message, got {messages!r:.60}.")
    for index, message in enumerate(messages):
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not (is_message and (isinstance(message.get("content"), str) or _are_parts(message.get("content")))):
            raise UsageError(f"Message {index} of the chat needs a 'role' and a 'content' that are text.")


def _are_parts(content: object) -> bool:
    """Whether it is what a template takes beside text."""
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and (part.get("type") == "image" or isinstance(part.get("text"), str))
        for part in content
    )
