"""The markers by which families write reasoning and calls, as fields of transformers' response templates.

Data only. A form is recognised by words of the model's chat template, which writes earlier answers in the same way.
What closes a JSON call may stand in one of its texts: `answer_reader` sees to that, so patterns here need not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CALL",
    "CALL_END",
    "CALL_FORMS",
    "CHANNELS",
    "HERMES",
    "REASONING_FORMS",
    "THINK_END",
    "MarkerForm",
    "fields_of",
]

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"

_JSON = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NOTHING = "(?=)"


@dataclass(frozen=True, slots=True)
class MarkerForm:
    """words: all are in the chat template. fields: of the response template, by name.

    strays: markers without a meaning of their own, left out where they stand outside of a field. markers: all of them.
    """

    words: Sequence[str]
    markers: Sequence[str]
    fields: Mapping[str, Any]
    strays: Sequence[str] = ()

    @property
    def before_strays(self) -> str:
        """The pattern of spaces that go with a stray: those between calls are nobody's."""
        return "" if "thinking" in self.fields else r"\s*"

    def is_written_by(self, template: str) -> bool:
        """Whether a chat template has it."""
        return all(word in template for word in self.words)


def fields_of(forms: Sequence[MarkerForm]) -> dict[str, Any]:
    """All fields of `forms`, content, and a region without text for what is to be left out."""
    fields: dict[str, Any] = {"content": {"content": "text"}}
    strays = dict.fromkeys(form.before_strays + re.escape(stray) for form in forms for stray in form.strays)
    if strays:
        pattern = rf"(?:{'|'.join(strays)})\s*"
        fields["strays"] = {"open_pattern": pattern, "close_pattern": _NOTHING, "repeats": True, "content": "text"}
    for form in forms:
        fields |= form.fields
    return fields


def _between(begin: str, end: str) -> MarkerForm:
    pattern = {"open_pattern": rf"{re.escape(begin)}\s*", "close_pattern": rf"\s*{re.escape(end)}\s*"}
    return MarkerForm((end,), (begin, end), {"thinking": {**pattern, "content": "text"}}, strays=(end,))


def _json_call(begin: str, end: str, *, words: Sequence[str], markers: Sequence[str], **more: Any) -> MarkerForm:
    """A name in the opening marker, arguments as JSON behind it."""
    field = {"open_pattern": begin, "close_pattern": end, **_JSON, "transform": _NAMED}
    return MarkerForm(words, markers, {"tool_calls": field}, **more)


def _listed_calls(begin: str, end: str) -> MarkerForm:
    """A JSON list of calls."""
    field = {"open_pattern": rf"\s*{re.escape(begin)}", "close_pattern": rf"\s*{re.escape(end)}", **_JSON}
    return MarkerForm((begin,), (begin, end), {"tool_calls": field}, strays=(end,))


def _tagged_call(begin: str, end: str, tag: str, *, words: Sequence[str], strays: Sequence[str]) -> MarkerForm:
    """A name in the opening marker, an argument in each tag."""
    field = {
        "open_pattern": begin,
        "close_pattern": end,
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag},
        "transform": _NAMED,
    }
    return MarkerForm(words, strays, {"tool_calls": field}, strays=strays)


REASONING_FORMS = (_between(THINK, THINK_END), _between("[THINK]", "[/THINK]"))

HERMES = MarkerForm(
    (CALL,),
    (CALL, CALL_END),
    {
        "tool_calls": {
            "open_pattern": rf"\s*{CALL}",
            "close_pattern": rf"\s*{CALL_END}",
            **_JSON,
            "transform": {"type": "function", "function": "{content}"},
        }
    },
    strays=(CALL_END,),
)

_QWEN_CODER = _tagged_call(
    rf"\s*{CALL}\s*<function=(?P<name>[^>\n]+)>",
    rf"</function>\s*{CALL_END}",
    r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
    words=(CALL, "<function="),
    strays=(CALL_END,),
)
_GLM = _tagged_call(
    rf"\s*{CALL}\s*(?P<name>[^<\s]+)\s*(?=<)",
    rf"\s*{CALL_END}",
    r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    words=(CALL, "<arg_key>"),
    strays=(CALL_END,),
)
_MINIMAX = _tagged_call(
    r'\s*(?:<minimax:tool_call>\s*)?<invoke name="?(?P<name>[^">\n]+)"?>',
    r"</invoke>",
    r'<parameter name="?(?P<key>[^">\n]+)"?>\s*(?P<value>.*?)\s*</parameter>',
    words=("<minimax:tool_call>", "<invoke name="),
    strays=("</minimax:tool_call>",),
)

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _SEPARATOR, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK: dict[str, Any] = {
    "markers": (_CALLS, _CALLS_END, _ONE, _SEPARATOR, _ONE_END),
    "strays": (_CALLS, _CALLS_END, _ONE_END),
}
_DEEPSEEK_V3 = _json_call(
    rf"\s*(?:{_CALLS}\s*)?{_ONE}function{_SEPARATOR}(?P<name>[^\n<]+)\n```json\n",
    rf"\s*```\s*{_ONE_END}",
    words=(_ONE, _SEPARATOR, "```json"),
    **_DEEPSEEK,
)
_DEEPSEEK_V31 = _json_call(
    rf"\s*(?:{_CALLS}\s*)?{_ONE}(?P<name>[^\n<]+){_SEPARATOR}",
    rf"\s*{_ONE_END}",
    words=(_ONE, _SEPARATOR),
    **_DEEPSEEK,
)

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_ONE, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI = _json_call(
    rf"\s*(?:{re.escape(_SECTION)}\s*)?{re.escape(_KIMI_ONE)}\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*"
    rf"{re.escape(_KIMI_ARGUMENTS)}",
    rf"\s*{re.escape(_KIMI_END)}",
    words=(_KIMI_ARGUMENTS,),
    markers=(_SECTION, _SECTION_END, _KIMI_ONE, _KIMI_ARGUMENTS, _KIMI_END),
    strays=(_SECTION, _SECTION_END, _KIMI_END),
)
_HUNYUAN = _json_call(
    rf"\s*(?:<tool_calls>\s*)?{CALL}(?P<name>[^\n<{{]+)\n```json\n",
    rf"\s*```\s*{CALL_END}",
    words=("<tool_calls>", CALL, "```json"),
    markers=("<tool_calls>", "</tool_calls>", CALL, CALL_END),
    strays=("<tool_calls>", "</tool_calls>", CALL_END),
)
_MISTRAL_NEXT = r"(?=\[TOOL_CALLS\])"
_MISTRAL = _json_call(
    r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
    _MISTRAL_NEXT,
    words=("[TOOL_CALLS]", "[ARGS]"),
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
_MISTRAL_LIST = MarkerForm(
    ("[TOOL_CALLS]",),
    ("[TOOL_CALLS]",),
    {"tool_calls": {"open_pattern": r"\s*\[TOOL_CALLS\]", "close_pattern": _MISTRAL_NEXT, **_JSON}},
)

CALL_FORMS = (
    _QWEN_CODER,
    _GLM,
    _MINIMAX,
    _KIMI,
    _DEEPSEEK_V3,
    _DEEPSEEK_V31,
    _HUNYUAN,
    _MISTRAL,
    _MISTRAL_LIST,
    _listed_calls("<|tool_call|>", "<|/tool_call|>"),
    _listed_calls("<TOOLCALL>", "</TOOLCALL>"),
    HERMES,
)
"""The most special first: some have the words of others."""

_BEGIN = r"(?:<\|start\|>assistant)?"
_TO = r"\s+to=(?:functions\.)?(?P<name>[^\s<]+)"
_KIND = r"\s*(?:<\|constrain\|>)?\s*\w*"
CHANNELS = MarkerForm(
    ("<|channel|>", "<|message|>"),
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    {
        "thinking": {
            "open_pattern": rf"{_BEGIN}<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": rf"{_BEGIN}(?:{_TO}<\|channel\|>\w+{_KIND}|<\|channel\|>\w+{_TO}{_KIND})<\|message\|>",
            "close_pattern": r"<\|call\|>|<\|end\|>",
            **_JSON,
            "transform": _NAMED,
        },
        "channels": {
            "open_pattern": rf"{_BEGIN}<\|channel\|>(?:final|commentary){_KIND}<\|message\|>",
            "close_pattern": _NOTHING,
            "repeats": True,
            "content": "text",
        },
    },
    strays=("<|end|>", "<|return|>", "<|call|>"),
)
"""GPT-OSS: reasoning, calls and content are channels of one format, so it is a form of its own."""
