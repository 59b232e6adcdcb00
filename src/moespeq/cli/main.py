"""`moespeq`: collects the subcommands and turns an error a person can meet into one sentence and exit code 2."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated

import typer

from moespeq import __version__
from moespeq.cli.json_lines import use_json_lines
from moespeq.cli.manual import ManualCommand, ManualGroup
from moespeq.cli.reporting import with_reporting
from moespeq.cli.sentences import complain
from moespeq.errors import MoespeqError

__all__ = ["app", "run"]

EXIT_ERROR = 2
EXIT_READER_GONE = 128 + 13  # as the shell shows a process that SIGPIPE ended
_SHOWN_CHARS = 100  # of a path that the system refused
PANELS = {
    "Ask a model": ("run", "chat", "serve"),
    "Stores": ("prepare", "verify", "export", "info", "upgrade"),
    "Plan and measure": ("plan", "doctor", "profile", "ablation", "demo"),
}
COMMANDS = tuple(name for names in PANELS.values() for name in names)
TRACE_COMMANDS = ("record", "show", "replay")
_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_EPILOG = (
    "Exit codes: 0 done; 1 what doctor warns of; 2 an error, in one sentence; 130 interrupted by Ctrl-C; 141 the "
    "reader of standard output went away; 143 ended by SIGTERM, also where serve let its answers end first."
)


def _add_command(group: typer.Typer, name: str, module: str, panel: str | None = None) -> None:
    command = with_reporting(
        importlib.import_module(f"moespeq.cli.{module}").command,
        usual_level="info" if name == "serve" else "warning",
    )
    group.command(name, cls=ManualCommand, rich_help_panel=panel, context_settings=_HELP_OPTIONS)(command)


app = typer.Typer(
    name="moespeq",
    cls=ManualGroup,
    help="Mixture-of-experts models larger than the device's memory, at full bf16 fidelity, by exact speculation.\n\n"
    "A MODEL is a checkpoint folder, a hub id such as org/name, or a store: a checkpoint as `prepare` writes it, its "
    "experts split into an INT4 base and a residual that make the same bits. The first run of the others makes one.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_HELP_OPTIONS,
)
for panel, names in PANELS.items():
    for name in names:
        _add_command(app, name, name, panel)

trace = typer.Typer(
    name="trace",
    cls=ManualGroup,
    help="Record what a run routed to, look at it, replay it on other hardware.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=_HELP_OPTIONS,
)
for name in TRACE_COMMANDS:
    _add_command(trace, name, f"trace_{name}")
app.add_typer(trace, rich_help_panel="Plan and measure")


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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal shows what it can
    use_json_lines(_asks_for_json(sys.argv))
    try:
        sys.exit(app(prog_name="moespeq", standalone_mode=False))  # which makes an interrupt 130
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(EXIT_READER_GONE)
        raise
    except MoespeqError as error:
        _fail(str(error))
    except OSError as error:
        _fail(_explain_system(error))
    except typer.TyperException as error:
        _fail(_explain(error))


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether stderr is to be JSON, known before the command line is read: what is wrong with that goes there too."""
    return "--log-format=json" in arguments or ("--log-format", "json") in pairwise(arguments)


def _explain(error: typer.TyperException) -> str:
    """A wrong command line in one sentence, with the nearest option where one was mistyped."""
    possible = getattr(error, "possibilities", None)
    if possible:
        return f"{error.message}. Did you mean '{possible[0]}'?"
    message = error.format_message()
    if message.endswith("?"):
        return message
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "moespeq"
    listed = "commands" if context is None or isinstance(context.command, ManualGroup) else "arguments and options"
    return f"{message.rstrip('.')}; `{command} --help` lists {listed}."


def _explain_system(error: OSError) -> str:
    """What the operating system refused, in one sentence."""
    name = str(error.filename or "")
    shown = name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."
    reason = " ".join(str(error.strerror or error).split())
    return f"{reason}: '{shown}'; check the path." if shown else f"{reason}; check the disk and where output goes."


def _fail(sentence: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()  # or what it could not write is tried again, and complained of, at the exit
    complain(sentence)
    sys.exit(EXIT_ERROR)
