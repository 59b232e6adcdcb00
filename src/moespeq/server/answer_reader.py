"""An answer as it grows, split into content, reasoning and calls. What may still be a marker is held, never sent.

A call is given when it is complete. One that is no call after all, cut off or malformed, becomes content, markers lost:
the client sees what the model said, and no part of it twice.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
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
    """One answer's. `push` its text piece by piece, then `end`. parser: None where all is content."""

    def __init__(self, parser: ResponseParser | None, *, is_one_call: bool = False) -> None:
        self._parser, self._is_one_call = parser, is_one_call
        self._held = ""  # of the call that is open
        self.num_calls = 0

    def push(self, text: str) -> AnswerPart:
        """What `text` settled."""
        if self._parser is None:
            return AnswerPart(content=text)
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError):
            return self._give_up(text)

    def end(self) -> AnswerPart:
        """What was held, now that no text follows."""
        if self._parser is None:
            return AnswerPart()
        try:
            return self._read(self._parser.finalize()[1])
        except (ValueError, KeyError):
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
        called = value.get("function") if isinstance(value, dict) else None
        held, self._held = self._held, ""
        if not isinstance(called, dict) or not isinstance(called.get("name"), str):
            part.content += held
            return
        if self._is_one_call and self.num_calls:
            return
        arguments = called.get("arguments", {})
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {"name": called["name"], "arguments": written}
        part.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        self.num_calls += 1
