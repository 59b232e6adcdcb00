"""Where log records go: stderr, one line each, as text for people or as JSON for programs.

A record may carry `extra={"facts": {...}}`: figures by name, `name=value` behind the text and keys of the JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

__all__ = ["configure_logs"]


def configure_logs(level: str, *, as_json: bool) -> None:
    """Log what moespeq and its HTTP server say from `level` on, and of other libraries what is a warning at least."""
    number = getattr(logging, level.upper())
    handler = _StderrHandler()
    handler.setFormatter(_JsonLines() if as_json else _TextLines("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    for name in ("moespeq", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
    warnings.formatwarning = _sentence


class _StderrHandler(logging.Handler):
    """Looks stderr up for each record: a bar that is drawn takes its place, and moves out of the way of lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        return super().formatMessage(record) + facts


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = getattr(record, "facts", {})
    return facts


def _sentence(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning without the line of code that raised it."""
    return str(message)
