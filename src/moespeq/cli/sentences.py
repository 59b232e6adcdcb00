"""What the command says of itself on stderr: one sentence, broken between words where a terminal shows it."""

from __future__ import annotations

import logging
import os
import sys
import textwrap

import typer

from moespeq.cli.json_lines import JsonLines

__all__ = ["complain"]


def complain(sentence: str) -> None:
    """Print `moespeq: sentence` to stderr, in a file or pipe as one line; where that is for programs, an object."""
    if isinstance(sys.stderr, JsonLines):
        sys.stderr.say(sentence, logging.ERROR)
        return
    text = f"moespeq: {sentence}"
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    if columns:
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    typer.echo(text, err=True)
