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

from moespeq.model.tokenizer import AnswerParser
from moespeq.server.json_texts import JsonTexts, pieces_of

__all__ = ["AnswerPart", "AnswerReader"]

_UNREADABLE = (ValueError, KeyError, RecursionError)
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

    def __init__(self, parser: AnswerParser | None, *, names: Collection[str] = (), is_one_call: bool = False) -> None:
        self._parser, self._names, self._is_one_call = parser, tuple(names), is_one_call
        self._has_json_calls = parser is not None and parser.has_json_calls
        self._held = ""  # of the call that is open
        self._texts: JsonTexts | None = None  # of that call
        self.num_calls = 0

    def push(self, text: str) -> AnswerPart:
        """What `text` settled."""
        part = AnswerPart()
        for piece in pieces_of(text):
            self._feed(piece, part)
        return part

    def end(self) -> AnswerPart:
        """What was held, now that no text follows; behind a call, the beginning of a marker is nothing."""
        part = AnswerPart()
        if self._parser is not None:
            try:
                events = self._parser.finalize()[1]
                self._read([event for event in events if not (self.num_calls and _is_content(event))], part)
            except _UNREADABLE:
                self._give_up("", part)
        return part

    def _feed(self, piece: str, part: AnswerPart) -> None:
        if self._parser is None:
            part.content += piece
            return
        if self._texts is not None:
            piece = self._texts.hide_markers(piece)
        try:
            self._read(self._parser.feed(piece), part)
        except _UNREADABLE:
            self._give_up(piece, part)

    def _give_up(self, piece: str, part: AnswerPart) -> None:
        """A template that cannot be applied: from here on all is content."""
        part.content += JsonTexts.show_markers(self._held + piece)
        self._held, self._texts, self._parser = "", None, None

    def _read(self, events: Sequence[dict[str, Any]], part: AnswerPart) -> None:
        for event in events:
            is_call, is_text = event["field"] == "tool_calls", event["type"] == "region_chunk"
            if is_text and is_call:
                self._held += event["text"]
            elif is_text and event["field"] in _REASONING:
                part.reasoning += event["text"]
            elif is_text:
                part.content += event["text"]
            elif is_call and event["type"] == "region_open":
                self._texts = JsonTexts() if self._has_json_calls else None
            elif is_call:
                self._close(event["value"], part)

    def _close(self, value: Any, part: AnswerPart) -> None:
        """A call, or a list of them, if that is what it is."""
        held, self._held, self._texts = self._held, "", None
        called = [_function(one) for one in (value if isinstance(value, list) else [value])]
        arguments = [_arguments(one) if self._is_known(one) else None for one in called]
        if None in arguments or not called:
            part.content += JsonTexts.show_markers(held.lstrip())
            return
        for one, text in zip(called, arguments, strict=True):
            if self._is_one_call and self.num_calls:
                return
            function = {"name": one["name"], "arguments": JsonTexts.show_markers(text or "")}
            part.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            self.num_calls += 1

    def _is_known(self, called: Any) -> bool:
        """Whether it is a call, of one of the functions there are."""
        return isinstance(called, dict) and called.get("name") in self._names


def _function(call: Any) -> Any:
    """What is called; in a list it may come without "type"."""
    return call.get("function", call) if isinstance(call, dict) else None


def _is_content(event: dict[str, Any]) -> bool:
    return bool(event["field"] == "content" and event["type"] == "region_chunk")


def _arguments(called: dict[str, Any]) -> str | None:
    """As JSON; None where the call says something else instead, no object, or what JSON cannot hold."""
    if "arguments" not in called and called.keys() != {"name"}:
        return None
    arguments = called.get("arguments", {})
    try:
        is_text = isinstance(arguments, str)
        text = arguments if is_text else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if not isinstance(json.loads(text), dict):
            return None
    except (ValueError, RecursionError):
        return None
    return text.encode(errors="backslashreplace").decode()  # half a character, as JSON writes it
