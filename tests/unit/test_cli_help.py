"""Help is a manual that answers at once: a paragraph, options by panel, an example, the same options everywhere."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer
from typer.main import get_command

from command_tree import COMMANDS, parse, words_of
from moespeq.cli.main import app
from moespeq.cli.manual import OUTPUT, example_of, paragraphs_of, params_by_panel

EVERYWHERE = {"--json", "--quiet", "--log-level", "--log-format", "--help"}
SLOW_TO_IMPORT = {"torch", "transformers", "numpy", "rich", "fastapi", "uvicorn", "safetensors", "tokenizers"}
every_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def shown(path: tuple[str, ...]) -> str:
    context = typer.Context(COMMANDS[path], info_name=f"moespeq {' '.join(path)}", terminal_width=78)
    return COMMANDS[path].get_help(context)


@every_command
def test_a_command_has_a_paragraph_and_options_of_output_like_all_others(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    summary = paragraphs_of(command.help).split("\n\n")[0]
    assert summary.endswith(".")
    panels = params_by_panel(command, typer.Context(command))
    assert [*panels][-1] == OUTPUT
    declared = " ".join(declaration for declaration, _ in panels[OUTPUT])
    assert {word.strip(",") for word in declared.split()} >= EVERYWHERE


@every_command
def test_an_example_is_a_command_line_that_parses_and_fits_a_terminal(path: tuple[str, ...]) -> None:
    lines = example_of(COMMANDS[path].help)
    assert lines
    for line in lines:
        assert line.startswith(f"moespeq {' '.join(path)}")
        parse(line)
        assert line in shown(path)


@every_command
def test_help_fits_eighty_columns_and_explains_every_option(path: tuple[str, ...]) -> None:
    assert max(map(len, shown(path).splitlines())) <= 80
    for rows in params_by_panel(COMMANDS[path], typer.Context(COMMANDS[path])).values():
        assert all(meaning for _, meaning in rows)


@every_command
def test_usage_and_declarations_are_words_of_people_and_not_types_of_python(path: tuple[str, ...]) -> None:
    text = shown(path)
    usage = text.partition("\n\n")[0]
    assert re.fullmatch(rf"Usage: moespeq {' '.join(path)} \[OPTIONS\]( [A-Z]+| \[[A-Z]+\])*", usage)
    assert not re.search(r"<[a-z]+\b|list\[|\{", text.replace("<=x<=", ""))
    usual = "info" if path == ("serve",) else "warning"
    assert f"logged to stderr; by default {usual}." in " ".join(text.split())


def test_the_first_help_says_what_a_store_is_and_every_exit_code() -> None:
    text = " ".join(get_command(app).get_help(typer.Context(get_command(app), info_name="moespeq")).split())
    assert "or a store: a checkpoint as `prepare` writes it" in text
    assert all(f" {code} " in text for code in (0, 1, 2, 130, 141, 143))


def test_what_can_be_refused_without_torch_is_refused_before_it_is_imported() -> None:
    lines = [
        *(f"{path} ./nope" for path in ("prepare", "info", "plan", "serve", "chat", "verify", "profile")),
        *(f"{path} ./nope -p x" for path in ("run", "ablation", "trace record --out t.trace")),
        *("export ./nope out", "doctor --run ./nope", "run org/name -p ''"),
        *(f"{path} org/name --device-memory 12QB" for path in ("plan", "run -p x", "chat", "serve", "profile")),
        *("demo --link-bandwidth fast", "doctor --device-memory lots"),
    ]
    code = (
        "import sys\nfrom moespeq.cli.main import run\n"
        f"for words in {[words_of(f'moespeq {line}') for line in lines]!r}:\n"
        "    sys.argv = words\n"
        "    try: run()\n"
        "    except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert dict(zip(lines, ended.stdout.splitlines(), strict=True)) == dict.fromkeys(lines, "2 False")
    assert len(ended.stderr.splitlines()) == len(lines)


def test_help_and_version_import_nothing_slow() -> None:
    lines = [["--help"], ["--version"], *([*path, "--help"] for path in COMMANDS)]
    code = (
        "import sys\nfrom moespeq.cli.main import app\n"
        f"for line in {lines!r}: app(line, standalone_mode=False)\n"
        f"print({SLOW_TO_IMPORT!r} & {{*sys.modules}})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("set()\n")
    assert all(f"moespeq {' '.join(path)}" in ended.stdout for path in COMMANDS)
