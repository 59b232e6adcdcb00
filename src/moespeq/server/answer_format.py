"""How a model writes what is not plain content: its reasoning, and calls of tools.

A tokenizer may say so itself, in its response_template. Where it does not, the chat template, which writes earlier
answers in the model's own format, gives it away by its markers; three formats are known:

- reasoning: <think> ... </think>, also where the template opens it;
- calls as JSON (Hermes, Qwen): <tool_call>{"name": ..., "arguments": ...}</tool_call>;
- calls as tags (Qwen3-Coder, Qwen3.5): <tool_call><function=...><parameter=...>...</parameter></function></tool_call>.

transformers' parser reads them all, so a format is data here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moespeq.errors import UsageError
from moespeq.model.tokenizer import Tokenizer

__all__ = ["CALL", "CALL_END", "THINK_END", "AnswerFormat", "format_of"]

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"

_ANCHOR = "assistant:"  # where the parser begins to read the prefix

_REASONING = {"open_pattern": rf"{THINK}\s*", "close_pattern": rf"\s*{THINK_END}\s*", "content": "text"}
_JSON_CALL = {
    "open_pattern": rf"\s*{CALL}\s*",
    "close_pattern": rf"\s*{CALL_END}",
    "repeats": True,
    "content": "json",
    "content_args": {"allow_non_json": True},
    "transform": {"type": "function", "function": "{content}"},
}
_TAGGED_CALL = {
    "open_pattern": rf"\s*{CALL}\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": rf"</function>\s*{CALL_END}",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_ENDS = {"thinking": THINK_END, "tool_calls": CALL_END}
_NOTHING = "(?=)"


def _strays(markers: Sequence[str]) -> dict[str, Any]:
    """A region without text for a marker that closes what nothing opened."""
    return {
        "open_pattern": rf"(?:{'|'.join(markers)})\s*",
        "close_pattern": _NOTHING,
        "repeats": True,
        "content": "text",
    }


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """template: transformers' response template. prefix: what ends in what the prompt wrote of the answer already.

    has_special: markers are special tokens, which text leaves out otherwise. is_json: calls can be put into a grammar.
    """

    template: Mapping[str, Any]
    prefix: str
    has_special: bool
    is_json: bool

    @property
    def opens_reasoning(self) -> bool:
        """Whether the prompt ends inside of it."""
        return self.prefix.rstrip().endswith(THINK)


def format_of(tokenizer: Tokenizer, prompt: Sequence[int], *, has_tools: bool) -> AnswerFormat | None:
    """How the answer to `prompt` will be written; None where all of it is content.

    Raises UsageError for tools that the model's template does not know, or whose calls nobody could read.
    """
    text = tokenizer.decode(list(prompt), skip_special_tokens=False)
    words = tokenizer.chat_template
    if has_tools and "tools" not in words:
        raise UsageError("This model's chat template takes no tools; leave them out.")
    if tokenizer.response_template is not None:
        return AnswerFormat(tokenizer.response_template, text, has_special=True, is_json=False)
    fields: dict[str, Any] = {"content": {"content": "text"}}
    if THINK_END in words:
        fields["thinking"] = _REASONING
    if has_tools and CALL in words:
        fields["tool_calls"] = _TAGGED_CALL if "<function=" in words else _JSON_CALL
    if has_tools and "tool_calls" not in fields:
        raise UsageError("This model calls tools in a format that is not known here; add a response_template to it.")
    if len(fields) == 1:
        return None
    fields["strays"] = _strays([end for name, end in _ENDS.items() if name in fields])
    is_inside = "thinking" in fields and text.rstrip().endswith(THINK)
    return AnswerFormat(
        {"start_anchor": _ANCHOR, "fields": fields},
        _ANCHOR + THINK if is_inside else "",
        has_special=not {THINK, THINK_END, CALL, CALL_END}.isdisjoint(tokenizer.special_tokens),
        is_json=fields.get("tool_calls") is _JSON_CALL,
    )
