"""`moespeq`: collects the subcommands and turns an error a person can meet into one sentence and exit code 2."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer

from moespeq import __version__
from moespeq.errors import MoespeqError

__all__ = ["app", "run"]

EXIT_ERROR = 2
COMMANDS = ("run", "prepare", "verify", "export", "info", "demo")

app = typer.Typer(
    name="moespeq",
    help="Mixture-of-experts models larger than the device's memory, at full bf16 fidelity, by exact speculation.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name in COMMANDS:
    app.command(name)(importlib.import_module(f"moespeq.cli.{name}").command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options before the subcommand."""


def run() -> None:
    """The entry point of the `moespeq` script."""
    # Before torch is imported: idle OpenMP threads must sleep, or on a busy machine their spinning takes ten times as
    # long as the work (measured with two other processes on two cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        sys.exit(app(standalone_mode=False))  # which makes an interrupt 130, and a reader that went away a quiet 1
    except MoespeqError as error:
        _fail(str(error))
    except typer.TyperException as error:
        _fail(_explain(error))


def _explain(error: typer.TyperException) -> str:
    """A wrong command line in one sentence, with the nearest option where one was mistyped."""
    possible = getattr(error, "possibilities", None)
    if possible:
        return f"{error.message}. Did you mean '{possible[0]}'?"
    message = error.format_message()
    return message if message.endswith("?") else f"{message.rstrip('.')}; `moespeq --help` lists commands and options."


def _fail(sentence: str) -> None:
    typer.echo(f"moespeq: {sentence}", err=True)
    sys.exit(EXIT_ERROR)
