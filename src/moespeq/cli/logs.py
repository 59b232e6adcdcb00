"""Where log records go: stderr, one line each, as text for people or as JSON for programs.

A record may carry `extra={"facts": {...}}`: figures by name, `name=value` behind the text and keys of the JSON object.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from moespeq.cli.json_lines import JsonLines, facts_of, use_json_lines

__all__ = ["configure_logs"]


def configure_logs(level: str, *, as_json: bool) -> None:
    """Log what moespeq and its HTTP server say from `level` on, and of other libraries what is a warning at least.

    as_json: all else on stderr is JSON too.
    """
    number = getattr(logging, level.upper())
    use_json_lines(as_json)
    handler = _StderrHandler()
    handler.setFormatter(_TextLines("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    for name in ("moespeq", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
    warnings.formatwarning = _sentence


class _StderrHandler(logging.Handler):
    """Looks stderr up for each record: a bar that is drawn takes its place, and moves out of the way of lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if isinstance(sys.stderr, JsonLines):
                sys.stderr.record(record)
            else:
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _TextLines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        facts = "".join(f" {name}={value}" for name, value in facts_of(record).items())
        return super().formatMessage(record) + facts


def _sentence(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning without the line of code that raised it."""
    return str(message)
