"""What every command says besides its result, and how: --quiet, --log-level, --log-format and Ctrl-C, the same for all.

Bars and notes are for a person at the terminal; logs, by the standard library, are for whoever reads them later. Both
go to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from moespeq.cli.manual import OUTPUT
from moespeq.cli.sentences import complain
from moespeq.errors import UsageError

__all__ = ["with_reporting"]

EXIT_INTERRUPTED = 130
_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("text", "json")

Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No bars, notes and warnings; errors and results only.", rich_help_panel=OUTPUT),
]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="|".join(_FORMATS),
        help="Lines on stderr as text, or each as one JSON object.",
        rich_help_panel=OUTPUT,
    ),
]


def _log_level(usual: str) -> Any:
    """The option; its help names the command's own default."""
    told = f"What is logged to stderr; by default {usual}."
    return Annotated[
        str | None, typer.Option("--log-level", metavar="|".join(_LEVELS), help=told, rich_help_panel=OUTPUT)
    ]


def with_reporting(command: Callable[..., None], *, usual_level: str) -> Callable[..., None]:
    """`command` with the three options, which take effect before it runs.

    A KeyboardInterrupt that it raises may carry what to do next.
    """

    @wraps(command)
    def reporting(*args: Any, quiet: bool, log_level: str | None, log_format: str, **given: Any) -> None:
        _require("log level", log_level or usual_level, _LEVELS)
        _require("log format", log_format, _FORMATS)
        from moespeq.cli.console import set_quiet
        from moespeq.cli.logs import configure_logs

        configure_logs(log_level or ("error" if quiet else usual_level), as_json=log_format == "json")
        try:
            set_quiet(quiet)
            command(*args, **given)
        except KeyboardInterrupt as interrupt:
            advice = f"; {interrupt}" if interrupt.args else "."
            complain(f"interrupted{advice}")
            raise typer.Exit(EXIT_INTERRUPTED) from None

    own = inspect.signature(command, eval_str=True)
    added = {"quiet": (Quiet, False), "log_level": (_log_level(usual_level), None), "log_format": (LogFormat, "text")}
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in added.items()
    ]
    reporting.__signature__ = own.replace(parameters=[*own.parameters.values(), *parameters])  # type: ignore[attr-defined]
    return reporting


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"The {name} '{value}' is unknown; use {', '.join(known)}.")
