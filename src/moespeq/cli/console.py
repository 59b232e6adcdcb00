"""What commands print: tables and bars for people, one JSON line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import StringIO
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

__all__ = ["Bar", "busy", "err", "out", "print_json", "print_table", "progress_bar", "token_bar"]

# No markup and no highlighting: names and paths are shown as they are, square brackets included.
out = Console(soft_wrap=True, markup=False, highlight=False)
err = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)

_UNBOUNDED_CHARS = 10_000  # no line of ours is as long


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def print_table(table: Table) -> None:
    """Its cells wrapped to a terminal's width; elsewhere a line a row, however long, for what searches in it."""
    if out.is_terminal:
        out.print(table, soft_wrap=False)
    else:
        text = StringIO()
        Console(file=text, width=_UNBOUNDED_CHARS).print(table)
        for line in text.getvalue().splitlines():
            out.print(line.rstrip())


def busy(what: str) -> AbstractContextManager[object]:
    """A line that moves on stderr while the block runs, on a terminal."""
    return err.status(what) if err.is_terminal else nullcontext()


class Bar:
    """A ProgressSink that draws from its first update on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def update(self, done: int, total: int, what: str) -> None:
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, completed=done, total=total, description=what)


def progress_bar() -> AbstractContextManager[Bar]:
    """A bar of bytes, rate and time left on stderr while the block runs."""
    return _bar(DownloadColumn(binary_units=True), TransferSpeedColumn())


def token_bar() -> AbstractContextManager[Bar]:
    """A bar of tokens and time left on stderr while the block runs."""
    return _bar(MofNCompleteColumn(), TextColumn("tokens"))


@contextmanager
def _bar(*figures: ProgressColumn) -> Iterator[Bar]:
    """None where stderr is no terminal, whose lines belong to errors."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *figures, TimeRemainingColumn())
    progress = Progress(*columns, console=err, disable=not err.is_terminal)
    try:
        yield Bar(progress)
    finally:
        if progress.live.is_started:  # stopping one that never began would print an empty line
            progress.stop()
