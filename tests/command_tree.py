"""The commands of `moespeq` as typer builds them, and a parser of command lines that runs nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from typer import Context
from typer.core import TyperCommand
from typer.main import get_command

from moespeq.cli.main import app
from moespeq.cli.manual import ManualGroup

__all__ = ["COMMANDS", "parse", "words_of"]


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, ManualGroup):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(_commands(get_command(app), ()))
"""Each command by the words that name it."""


def words_of(line: str) -> list[str]:
    """What a shell makes of a line; $'...' holds one escape, a new line."""
    return shlex.split(re.sub(r"\$'(.*?)'", lambda match: shlex.quote(match[1].replace(r"\n", "\n")), line))


def parse(line: str) -> Context:
    """Parse a `moespeq` command line as the program would; raises typer's error for a wrong one."""
    program, *words = words_of(line)
    assert program == "moespeq", line
    path = tuple(words[:2]) if tuple(words[:2]) in COMMANDS else tuple(words[:1])
    assert path in COMMANDS, f"{line}: no such command"
    return COMMANDS[path].make_context(" ".join(path), words[len(path) :])
