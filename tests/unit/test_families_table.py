"""What `moespeq info --families` says: every family of transformers with routed experts, supported or refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import transformers
from rich.console import Console
from typer.testing import CliRunner

from moespeq.cli import console, info
from moespeq.cli.main import app
from moespeq.model.families import FAMILIES, REFUSED, describe_families

MODELS = Path(transformers.__file__).parent / "models"


def test_no_family_is_both_taken_and_refused() -> None:
    assert not FAMILIES.keys() & REFUSED.keys()


def test_every_family_with_the_experts_interface_is_named() -> None:
    named = {name.removesuffix("_text") for name in (*FAMILIES, *REFUSED)}
    files = MODELS.glob("*/modeling_*.py")
    using = {file.parent.name for file in files if "use_experts_implementation" in file.read_text(encoding="utf-8")}
    assert len(using) >= 54
    assert using <= named


def test_refusals_say_why_and_supported_families_need_not() -> None:
    for family in describe_families():
        assert family["supported"] == (family["reason"] is None), family
        assert family["supported"] or re.fullmatch(r"[a-z].*[^.]", str(family["reason"])), family


def test_the_command_lists_them_for_people_and_for_programs() -> None:
    told = CliRunner().invoke(app, ["info", "--families"])
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    assert len(lines) == len(FAMILIES) + len(REFUSED)
    assert re.match(r"afmoe +supported$", lines[0])
    shimmed = [line.split()[0] for line in lines if line.endswith("supported, with a shim of ours")]
    assert shimmed == ["dbrx", "deepseek_v4", "llama4", "step3p5"]
    assert any(line.startswith("jetmoe ") and "experts interface" in line for line in lines)
    listed = json.loads(CliRunner().invoke(app, ["info", "--families", "--json"]).stdout)
    assert listed == {"families": describe_families()}


def test_on_a_terminal_a_reason_goes_on_below_itself_and_not_below_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=text, force_terminal=True, width=80, no_color=True))
    info.command(families=True)
    lines = text.getvalue().splitlines()
    families = [str(family["name"]) for family in describe_families()]
    names = [line[: max(map(len, families)) + 2].strip() for line in lines]
    assert sorted(filter(None, names)) == sorted(families)
    assert "" in names, "some reason takes two lines"


@pytest.mark.parametrize("words", [[], ["model", "--families"]])
def test_a_model_or_the_families_are_asked_for_and_not_both(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["info", *words])
    assert "Give a MODEL to describe, or --families alone." in str(result.exception)
