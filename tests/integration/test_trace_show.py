"""`moespeq trace show` as people and programs meet it: tables, one JSON line, and a folder of figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from synthetic_trace import synthetic_trace

Cli = Callable[..., tuple[int, str, str]]
FIGURES = {"entropy", "reuse", "distinct-experts", "hit-rate", "fidelity-by-layer", "draft-steps", "roofline"}


@pytest.fixture
def show(cli: Cli) -> Cli:
    return partial(cli, "trace", "show")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.trace"
    made = synthetic_trace(6, 16, 2, 80, stickiness=0.4, fidelity=0.8, same_set=0.1, acceptance=0.8)
    made.write(path)
    return path


def test_show_prints_every_table_with_its_sentence_and_leaves_no_file(show: Cli, trace: Path) -> None:
    code, out, err = show(trace)
    assert (code, err) == (0, "")
    for title in ("Activation entropy", "Reuse", "Distinct experts", "Hit rate", "Routes foretold", "accepted"):
        assert title in out
    for said in (
        "equally popular",
        "times chance",
        "moves",
        "LRU hits",
        "lookahead",
        "near a verify",
        "confidence tells",
    ):
        assert said in " ".join(out.split())
    assert "\x1b" not in out, "no colours where nobody looks"
    assert list(trace.parent.iterdir()) == [trace]


def test_json_is_one_line_with_the_study_and_its_findings(show: Cli, trace: Path) -> None:
    code, out, _ = show(trace, "--json")
    facts = json.loads(out)
    assert (code, out.count("\n"), facts["files"]) == (0, 1, [])
    assert (facts["num_layers"], facts["num_experts"], facts["top_k"], facts["num_positions"]) == (6, 16, 2, 80)
    assert [cache["rows"] for cache in facts["cache"]] == [1, 9, 33]
    assert len(facts["entropy"]["bits"]) == len(facts["fidelity"]["draft_by_layer"]) == 6
    assert facts["findings"].keys() >= {"entropy", "reuse", "distinct", "cache", "layers", "steps", "acceptance"}


def test_out_gets_figures_that_are_svg_and_the_study(show: Cli, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "figures"
    code, out, _ = show(trace, "--out", folder, "--json")
    facts = json.loads(out)
    assert code == 0
    assert {path.name for path in folder.iterdir()} == {f"{name}.svg" for name in FIGURES} | {"study.json"}
    assert {Path(path).parent for path in facts.pop("files")} == {folder}
    assert json.loads((folder / "study.json").read_text()) == facts
    for name in FIGURES:
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_equal_traces_give_equal_figures(show: Cli, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        assert show(trace, "--out", tmp_path / folder)[0] == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_text_of_two_tokens_is_shown_and_drawn(show: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    synthetic_trace(1, 4, 1, 2).write(tmp_path / "t.trace")
    code, out, err = show(tmp_path / "t.trace", "--out", tmp_path / "figures")
    assert (code, "wrote 8 files" in err) == (0, True)
    assert "Only step 0 was recorded" in out or "beyond" in out


def test_without_matplotlib_tables_are_shown_and_figures_refused_first(
    show: Cli, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert show(trace)[0] == 0
    code, out, err = show(trace, "--out", tmp_path / "figures")
    assert (code, out) == (2, "")
    assert err == "moespeq: Figures need matplotlib, which is missing; `pip install matplotlib` adds it.\n"
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_what_is_no_trace_is_refused_in_one_sentence(arguments: tuple[str, ...], show: Cli, tmp_path: Path) -> None:
    code, out, err = show(tmp_path / "missing", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "does not exist; `moespeq trace record` makes one" in err


def test_a_folder_that_is_a_file_is_refused_in_one_sentence(show: Cli, trace: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = show(trace, "--out", trace)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(trace) in err
