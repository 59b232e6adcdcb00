"""Logs go to stderr, a line each, as text or as JSON; warnings are sentences; other libraries stay quiet.

Where logs are JSON, so is all else that is said on stderr.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from moespeq.cli.logs import configure_logs
from moespeq.cli.sentences import complain

FACTS = {"facts": {"tokens": 8, "ttft_s": 0.25}}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root, shape = logging.getLogger(), warnings.formatwarning
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    warnings.formatwarning = shape
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("moespeq", "uvicorn"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_text_has_the_level_the_message_and_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", as_json=False)
    logging.getLogger("moespeq.decode").info("a text is generated", extra=FACTS)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("INFO    a text is generated tokens=8 ttft_s=0.25\n")


def test_json_is_one_object_a_line_with_figures_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", as_json=True)
    logging.getLogger("moespeq.decode").info("two\nlines", extra=FACTS)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("moespeq").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "moespeq.decode", "two\nlines")
    assert (first["tokens"], first["ttft_s"]) == (8, 0.25)
    assert "ValueError: why" in second["exception"]


def test_other_libraries_are_heard_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("debug", as_json=False)
    logging.getLogger("somebody.else").info("chatter")
    logging.getLogger("somebody.else").warning("careful")
    logging.getLogger("moespeq").debug("detail")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["careful", "detail"]


def test_a_warning_is_its_sentence_without_a_line_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("warning", as_json=False)
    warnings.warn("top_h is not applied; leave it out.", stacklevel=1)
    assert capsys.readouterr().err.endswith("WARNING top_h is not applied; leave it out.\n")


def test_all_on_stderr_is_json_where_logs_are(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("info", as_json=True)
    sys.stderr.write("\x1b[2mloading demo\x1b[0m\n\nhalf a ")
    assert not sys.stderr.isatty()
    sys.stderr.write("line\nno end")
    logging.getLogger("moespeq").info("a text is generated", extra=FACTS)
    warnings.warn("careful", stacklevel=1)
    complain("interrupted.")
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(one["level"], one["message"]) for one in said] == [
        ("info", "loading demo"),
        ("info", "half a line"),
        ("info", "no end"),
        ("info", "a text is generated"),
        ("warning", "careful"),
        ("error", "interrupted."),
    ]
    assert all({"time", "logger"} <= one.keys() for one in said)


def test_json_ends_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, True, False):
        configure_logs("info", as_json=as_json)
    complain("interrupted.")
    assert capsys.readouterr().err == "moespeq: interrupted.\n"
