"""What a terminal is shown while something takes long, and what --quiet, a pipe and Ctrl-C make of it."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from typing import Any

import pytest
import typer
from rich.console import Console

from moespeq.cli import console
from moespeq.cli.reporting import EXIT_INTERRUPTED, with_reporting
from moespeq.cli.sentences import complain
from moespeq.errors import UsageError


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal of 80 columns in place of stderr."""
    shown = Console(file=io.StringIO(), force_terminal=True, width=80, markup=False, highlight=False)
    monkeypatch.setattr(console, "err", shown)
    return shown


def text_of(terminal: Console) -> str:
    file = terminal.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_bytes_have_a_rate_and_other_things_a_count_in_one_bar(terminal: Console) -> None:
    with console.progress_bar() as bar:
        bar.update(1 << 20, 4 << 20, "loading")
        bar.update(4 << 20, 4 << 20, "loading")
        bar.counting("tokens").update(3, 40, "drafting")
    text = text_of(terminal)
    assert "/4.0 MiB" in text
    assert "m?" not in text  # an unknown rate is no figure
    assert "3/40 tokens" in text


def test_a_bar_that_nothing_updates_is_never_drawn(terminal: Console) -> None:
    with console.progress_bar():
        pass
    assert text_of(terminal) == ""


def test_silence_leaves_no_bar_no_note_and_no_text_beside_json(terminal: Console) -> None:
    console.set_quiet(True)
    terminal.print("a note")
    with console.progress_bar() as bar:
        bar.update(1, 2, "loading")
    console.text_stream(has_json=True).write("text")
    assert text_of(terminal) == ""
    assert console.text_stream(has_json=False) is sys.stdout


def test_a_terminal_breaks_a_sentence_between_words_and_a_file_keeps_it_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "org/name is no local folder and was not down-loaded; check its name"
    complain(sentence)
    assert capsys.readouterr().err == f"moespeq: {sentence}\n"
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 24)))
    complain(sentence)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 20
    assert " ".join(lines) == f"moespeq: {sentence}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.118, 0.12, 0.0264, 0.1], ["0.118", "0.120", "0.026", "0.100"]),
        ([1234.5, 62.6], ["1234", "63"]),
        ([62.6, 9.0], ["62.6", "9.0"]),
        ([0.0], ["0"]),
        ([], []),
    ],
)
def test_a_column_has_the_decimals_that_its_largest_figure_needs(values: list[float], expected: list[str]) -> None:
    assert console.column(values) == expected


def test_resumable_work_says_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        with console.resumable():
            raise KeyboardInterrupt

    assert interrupted(command) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == (
        "moespeq: interrupted; what is done stays, and the same command goes on from there.\n"
    )


def test_an_interrupt_that_an_import_swallows_still_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallow(name: str) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError(name) from None

    monkeypatch.setattr(importlib, "import_module", swallow)
    with pytest.raises(KeyboardInterrupt):
        console.start_torch()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(command: Any) -> int:
    """The exit code of a command that an interrupt ends."""
    with pytest.raises(typer.Exit) as ended:
        with_reporting(command, usual_level="warning")(quiet=False, log_level=None, log_format="text")
    return ended.value.exit_code


@pytest.mark.parametrize(("option", "value"), [("log_level", "loud"), ("log_format", "xml")])
def test_an_unknown_level_or_format_is_refused_before_anything_runs(option: str, value: str) -> None:
    ran = with_reporting(lambda: pytest.fail("ran"), usual_level="warning")
    given: dict[str, Any] = {"quiet": False, "log_level": None, "log_format": "text", option: value}
    with pytest.raises(UsageError, match=f"'{value}' is unknown; use"):
        ran(**given)


def test_one_quiet_command_leaves_the_next_one_its_words() -> None:
    told: list[bool] = []
    command = with_reporting(lambda: told.append(console.err.quiet), usual_level="warning")
    for quiet in (True, False):
        command(quiet=quiet, log_level=None, log_format="text")
    assert told == [True, False]
