"""What the command says of itself on stderr: one sentence, broken between words where a terminal shows it."""

from __future__ import annotations

import os
import sys
import textwrap

import typer

__all__ = ["complain"]


def complain(sentence: str) -> None:
    """Print `moespeq: sentence` to stderr; in a file or pipe it stays one line."""
    text = f"moespeq: {sentence}"
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    if columns:
        text = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
    typer.echo(text, err=True)
