"""What commands print: tables and bars for people, one JSON line for programs."""

from __future__ import annotations

import importlib
import io
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from moespeq.config import format_bytes

__all__ = [
    "Bar",
    "column",
    "err",
    "note_new_folder",
    "out",
    "print_json",
    "print_table",
    "progress_bar",
    "replies",
    "resumable",
    "set_quiet",
    "start_torch",
    "text_stream",
]

_BYTES = "bytes"

# No markup and no highlighting: names and paths are shown as they are, square brackets included.
out = Console(soft_wrap=True, markup=False, highlight=False)
err = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
replies = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)  # what was asked for: not silenced
for console in (out, err, replies):
    console.soft_wrap = not console.is_terminal  # a terminal breaks lines between words, a file keeps them whole


def set_quiet(is_quiet: bool) -> None:
    """Whether `err` prints nothing and draws no bar from now on."""
    err.quiet = is_quiet


_UNBOUNDED_CHARS = 10_000  # no line of ours is as long


def column(values: Sequence[float]) -> list[str]:
    """Figures that stand below each other: each with as many decimals as the largest needs for three digits."""
    largest = max(values, default=0.0)
    decimals = max(0, 2 - math.floor(math.log10(largest))) if largest > 0.0 else 0
    return [f"{value:.{decimals}f}" for value in values]


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def print_table(table: Table) -> None:
    """Its cells wrapped to a terminal's width; elsewhere a line a row, however long, for what searches in it."""
    if out.is_terminal:
        out.print(table, soft_wrap=False)
    else:
        text = io.StringIO()
        Console(file=text, width=_UNBOUNDED_CHARS).print(table)
        for line in text.getvalue().splitlines():
            out.print(line.rstrip())


def note_new_folder(path: Path) -> None:
    """Say it where the folder that `path` is to be written into is not there and will be made: it may be mistyped."""
    folder = path.absolute().parent
    if not folder.exists():
        err.print(f"making the folder {folder}", style="dim")


@contextmanager
def resumable() -> Iterator[None]:
    """Around work whose finished part stays: Ctrl-C says so."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what is done stays, and the same command goes on from there.") from None


def start_torch() -> None:
    """Import what takes seconds, and say so meanwhile.

    Some library swallows a KeyboardInterrupt that comes while it is imported, or makes another error of it; so that
    Ctrl-C came is remembered.
    """
    signals: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGINT, hear)
    try:
        with err.status("starting PyTorch"):
            importlib.import_module("moespeq.api")
    finally:
        signal.signal(signal.SIGINT, usual)
        if signals:
            raise KeyboardInterrupt


def text_stream(*, has_json: bool) -> TextIO:
    """Where a model's text goes: stdout, or where that belongs to one JSON object, stderr, unless silenced."""
    if not has_json:
        return sys.stdout
    return io.StringIO() if err.quiet else sys.stderr


class Bar:
    """A ProgressSink of bytes, rate and time left that draws from its first update on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._unit = ""

    def update(self, done: int, total: int, what: str) -> None:
        self.draw(done, total, what, _BYTES)

    def counting(self, unit: str) -> Counter:
        """The same bar for tokens, replays or whatever `unit` names."""
        return Counter(partial(self.draw, unit=unit))

    def draw(self, done: int, total: int, what: str, unit: str) -> None:
        if self._task is None or unit != self._unit:  # rate and time left are those of one unit
            if self._task is None:
                self._progress.start()
            else:
                self._progress.remove_task(self._task)
            self._task, self._unit = self._progress.add_task(what, total=total, unit=unit), unit
        self._progress.update(self._task, completed=done, total=total, description=what)


@dataclass(frozen=True, slots=True)
class Counter:
    """A ProgressSink of something that is not bytes."""

    update: Callable[[int, int, str], None]


class _Figures(ProgressColumn):
    """How much of how much is done: bytes with their rate, anything else as a count."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn(binary_units=True)  # as tables write sizes

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == _BYTES:
            rate = task.finished_speed or task.speed
            return Text.assemble(self._bytes.render(task), f" {format_bytes(rate)}/s" if rate else "")
        return Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['unit']}", style="progress.download")


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """A bar on stderr while the block runs; none where that is no terminal, whose lines belong to errors."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Figures(), TimeRemainingColumn())
    progress = Progress(*columns, console=err, disable=err.quiet or not err.is_terminal)
    try:
        yield Bar(progress)
    finally:
        if progress.live.is_started:  # stopping one that never began would print an empty line
            progress.stop()
