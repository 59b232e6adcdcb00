"""Standard error for programs: every line one JSON object, whoever wrote it.

Log records come as records; what a command, a library or the interpreter writes as text becomes the `message` of one.
What native code writes past Python is out of reach.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

__all__ = ["JsonFormatter", "JsonLines", "facts_of", "use_json_lines"]

_LOGGER = "moespeq.cli"  # of what came as text


class JsonFormatter(logging.Formatter):
    """A record as one object, its facts as keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class JsonLines(io.TextIOBase):
    """Text that goes `below` a line at a time, each an object; empty lines are left out. From any thread.

    It is no terminal, so bars and colours stay away. A line without an end waits for that, or for the next record.
    """

    def __init__(self, below: TextIO) -> None:
        self.below = below
        self._formatter, self._lock, self._rest = JsonFormatter(), threading.Lock(), ""

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._put_text(line)
        return len(text)

    def record(self, record: logging.LogRecord) -> None:
        """Write `record`, behind what is left of a line."""
        with self._lock:
            self._put_text(self._rest)
            self._rest = ""
            self._put(record)

    def say(self, sentence: str, level: int) -> None:
        """Write `sentence` as a record of the command itself."""
        self.record(_spoken(sentence, level))

    def flush(self) -> None:
        self.below.flush()

    def fileno(self) -> int:
        return self.below.fileno()

    def writable(self) -> bool:
        return True

    def _put_text(self, line: str) -> None:
        from rich.text import Text

        plain = Text.from_ansi(line).plain  # FORCE_COLOR colours what is no terminal
        if plain.strip():
            self._put(_spoken(plain, logging.INFO))

    def _put(self, record: logging.LogRecord) -> None:
        self.below.write(self._formatter.format(record) + "\n")
        self.below.flush()


def use_json_lines(is_wanted: bool) -> None:
    """Whether stderr is JSON lines from now on."""
    below = sys.stderr.below if isinstance(sys.stderr, JsonLines) else sys.stderr
    sys.stderr = JsonLines(below) if is_wanted else below


def facts_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """The figures by name that a record carries."""
    facts: Mapping[str, Any] = getattr(record, "facts", {})
    return facts


def _spoken(sentence: str, level: int) -> logging.LogRecord:
    return logging.LogRecord(_LOGGER, level, "", 0, sentence, None, None)
