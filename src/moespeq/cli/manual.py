"""How `--help` looks: a paragraph, options by panel, and an example that can be copied, in plain text.

Owns the layout and no words: text comes from docstrings, whose last paragraph begins with "Example: ", and from
options, whose `rich_help_panel` is their heading. Plain on purpose: rich takes longer to import than help may take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter, Parameter  # typer has no public names for these

__all__ = ["OUTPUT", "ManualCommand", "ManualGroup", "example_of", "paragraphs_of", "params_by_panel"]

OUTPUT = "Output"
EXIT_USAGE = 2
_ARGUMENTS, _OPTIONS = "Arguments", "Options"
_EXAMPLE = "\n\nExample: "
_TYPE = re.compile(r" <(?:list\[)?(\w+)[^>]*>")
_TYPE_WORDS = {"str": "TEXT", "int": "INT", "float": "NUMBER", "path": "PATH"}


def paragraphs_of(help_text: str | None) -> str:
    """A command's description, without its example."""
    return (help_text or "").partition(_EXAMPLE)[0]


def example_of(help_text: str | None) -> list[str]:
    """The command lines of a command's example."""
    return [line.strip() for line in (help_text or "").partition(_EXAMPLE)[2].splitlines()]


def params_by_panel(command: TyperCommand | TyperGroup, context: Context) -> Mapping[str, Sequence[tuple[str, str]]]:
    """(Declaration, meaning) of each parameter, by the panel it belongs to: arguments first, output last."""
    panels: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OPTIONS: []}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None:
            declaration, meaning = record
            panels.setdefault(_panel_of(param), []).append((_in_words(declaration, param), meaning))
    output = panels.pop(OUTPUT, [])
    return {name: rows for name, rows in (*panels.items(), (OUTPUT, output)) if rows}


def _in_words(declaration: str, param: Parameter) -> str:
    """A declaration without Python's types; an argument's name says enough."""
    if param.param_type_name == "argument":
        return _TYPE.sub("", declaration)
    return _TYPE.sub(lambda match: f" {_TYPE_WORDS[match[1]]}", declaration)


def _panel_of(param: Parameter) -> str:
    if param.param_type_name == "argument":
        return _ARGUMENTS
    own = getattr(param, "rich_help_panel", None)
    return str(own or (OUTPUT if param.name == "help" else _OPTIONS))


def _write_options(command: TyperCommand | TyperGroup, context: Context, formatter: HelpFormatter) -> None:
    for name, rows in params_by_panel(command, context).items():
        with formatter.section(name):
            formatter.write_dl(rows)


def _write_text(text: str, formatter: HelpFormatter) -> None:
    formatter.write_paragraph()
    formatter.write_text(text)


class ManualCommand(TyperCommand):
    """A command whose help is a page of a manual."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Options, then arguments, those in brackets that may be left out."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        names = [(str(param.metavar), param.required) for param in arguments]
        return ["[OPTIONS]", *(name if is_required else f"[{name}]" for name, is_required in names)]

    def format_help_text(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The description, without a margin."""
        _write_text(paragraphs_of(self.help), formatter)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """A section for each panel."""
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The example, its lines as they are."""
        with formatter.section("Example"):
            for line in example_of(self.help):
                formatter.write(f"  {line}\n")


class ManualGroup(TyperGroup):
    """A group whose commands stand under headings too; without a command the help is shown, and the exit code is 2."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """The help is no error's message: it goes to stdout."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(EXIT_USAGE)
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The description, without a margin."""
        _write_text(self.help or "", formatter)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Commands first: they are what is looked for."""
        for name, rows in self._commands_by_panel(ctx):
            with formatter.section(name):
                formatter.write_dl(rows)
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """What holds for all commands."""
        if self.epilog:
            _write_text(self.epilog, formatter)

    def _commands_by_panel(self, ctx: Context) -> Iterator[tuple[str, Sequence[tuple[str, str]]]]:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            panels.setdefault(str(panel), []).append((name, paragraphs_of(command.help).split("\n\n")[0]))
        yield from panels.items()
