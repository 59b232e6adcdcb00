"""An answer as it grows, split into content, reasoning and calls. What may still be a marker is held, never sent.

A call is given when it is complete. One that is no call after all (cut off, malformed, or of no function that is known)
becomes content, markers lost: the client sees what the model said, and no part of it twice.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from moespeq.model.tokenizer import ResponseParser

__all__ = ["AnswerPart", "AnswerReader"]

_REASONING = ("thinking", "reasoning", "reasoning_content")  # as response templates name it


@dataclass(slots=True)
class AnswerPart:
    """What became certain. calls: as OpenAI's API has them."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerReader:
    """One answer's. `push` its text piece by piece, then `end`.

    parser: None where all is content; names: of the functions that may be called.
    """

    def __init__(
        self, parser: ResponseParser | None, *, names: Collection[str] = (), is_one_call: bool = False
    ) -> None:
        self._parser, self._names, self._is_one_call = parser, tuple(names), is_one_call
        self._held = ""  # of the call that is open
        self.num_calls = 0

    def push(self, text: str) -> AnswerPart:
        """What `text` settled."""
        if self._parser is None:
            return AnswerPart(content=text)
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError, RecursionError):
            return self._give_up(text)

    def end(self) -> AnswerPart:
        """What was held, now that no text follows; behind a call, the beginning of a marker is nothing."""
        if self._parser is None:
            return AnswerPart()
        try:
            events = self._parser.finalize()[1]
            return self._read([event for event in events if not (self.num_calls and _is_content(event))])
        except (ValueError, KeyError, RecursionError):
            return self._give_up("")

    def _give_up(self, text: str) -> AnswerPart:
        """A template that cannot be applied: from here on all is content."""
        held, self._held, self._parser = self._held, "", None
        return AnswerPart(content=held + text)

    def _read(self, events: Sequence[dict[str, Any]]) -> AnswerPart:
        part = AnswerPart()
        for event in events:
            is_call, is_text = event["field"] == "tool_calls", event["type"] == "region_chunk"
            if is_text and is_call:
                self._held += event["text"]
            elif is_text and event["field"] in _REASONING:
                part.reasoning += event["text"]
            elif is_text:
                part.content += event["text"]
            elif is_call and event["type"] == "region_close":
                self._close(event["value"], part)
        return part

    def _close(self, value: Any, part: AnswerPart) -> None:
        called: Any = value.get("function") if isinstance(value, dict) else None
        held, self._held = self._held, ""
        arguments = _arguments(called) if self._is_known(called) else None
        if arguments is None:
            part.content += held
            return
        if self._is_one_call and self.num_calls:
            return
        function = {"name": called["name"], "arguments": arguments}
        part.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        self.num_calls += 1

    def _is_known(self, called: Any) -> bool:
        """Whether it is a call, of one of the functions there are."""
        return isinstance(called, dict) and called.get("name") in self._names


def _is_content(event: dict[str, Any]) -> bool:
    return bool(event["field"] == "content" and event["type"] == "region_chunk")


def _arguments(called: dict[str, Any]) -> str | None:
    """As JSON; None where the call says something else instead, or what JSON cannot hold."""
    if "arguments" not in called and called.keys() != {"name"}:
        return None
    arguments = called.get("arguments", {})
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    return text.encode(errors="backslashreplace").decode()  # half a character, as JSON writes it
