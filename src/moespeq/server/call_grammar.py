"""The form of an answer that calls tools, in llguidance's dialect of Lark, for models whose calls are JSON.

Asked for where an answer must be a call, where a function is strict, or where what is no call must match a schema; else
a model writes as it likes, and what it wrote is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import StructTag

from moespeq.errors import UsageError
from moespeq.server.answer_format import AnswerFormat
from moespeq.server.chat_protocol import Tool
from moespeq.server.marker_forms import CALL, CALL_END, THINK_END
from moespeq.server.schemas import enforceable

__all__ = ["calls_between_text", "calls_or_json", "only_calls"]

_SPACES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def only_calls(written: AnswerFormat, tools: Sequence[Tool], *, is_one_call: bool) -> str:
    """One call or more, and nothing else."""
    return f"{_start(written)} calls\n{_calls(written, tools, is_one_call)}"


def calls_or_json(written: AnswerFormat, tools: Sequence[Tool], schema: dict[str, Any], *, is_one_call: bool) -> str:
    """Either calls, or JSON that `schema` admits."""
    answer = f"answer: %json {json.dumps(_compact(schema))}\n"
    return f"{_start(written)} (calls | answer)\n{answer}{_calls(written, tools, is_one_call)}"


def calls_between_text(written: AnswerFormat, tools: Sequence[Tool]) -> str:
    """Any text, in which every call is one of `tools`."""
    tags = [
        StructTag(trigger=CALL, begin=f"{CALL}\n{_front(tool)}", grammar=_parameters(tool), end=f"}}\n{CALL_END}")
        for tool in tools
    ]
    return str(StructTag.to_grammar(tags, assume_special=written.has_special))


def _start(written: AnswerFormat) -> str:
    """Where the prompt ends inside of the reasoning, that goes on first."""
    if not written.opens_reasoning:
        return "%llguidance {}\nstart:"
    return f"%llguidance {{}}\nthought[lazy]: /(.|\\n)*/ {_quoted(THINK_END)} \nstart: thought /\\s*/"


def _calls(written: AnswerFormat, tools: Sequence[Tool], is_one_call: bool) -> str:
    begin, end = (marker if written.has_special else _quoted(marker) for marker in (CALL, CALL_END))
    bodies = " | ".join(f"{_quoted(_front(tool))} %json {_parameters(tool)} {_quoted('}')}" for tool in tools)
    more = "" if is_one_call else ' ("\\n" call)*'
    return f'calls: call{more}\ncall: {begin} "\\n" body "\\n" {end}\nbody: {bodies}\n'


def _front(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.function.name)}, "arguments": '


def _parameters(tool: Tool) -> str:
    """Arguments are an object, whatever else the schema says."""
    schema = {"type": "object"} | enforceable(tool.function.parameters)
    if schema["type"] != "object":
        name, given = tool.function.name, schema["type"]
        raise UsageError(f"The parameters of '{name:.60}' should be of type 'object', got {given!r:.60}; change them.")
    return json.dumps(_compact(schema))


def _compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A weak model would write free spaces without end."""
    return schema | _SPACES


def _quoted(text: str) -> str:
    return json.dumps(text)
