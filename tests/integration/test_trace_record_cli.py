"""`moespeq trace record` as people and programs meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import moespeq.api
from moespeq.replay import RoutingTrace

Cli = Callable[..., tuple[int, str, str]]
PROMPT = ("-p", "A router sends every token", "-n", "6", "--ignore-eos", "--device", "cpu")


@pytest.fixture
def record(cli: Cli) -> Cli:
    return partial(cli, "trace", "record")


def test_it_writes_a_trace_and_says_what_is_in_it_and_what_to_do_next(
    record: Cli, tiny_store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new folder" / "t"
    code, said, err = record(tiny_store, "--out", out, *PROMPT, "--k", "3", "--temperature", "1", "--seed", "4")
    assert (code, err) == (0, f"making the folder {out.parent}\n")
    assert f"{out}: 6 tokens in" in said
    assert f"moespeq trace show '{out}'" in said
    trace = RoutingTrace.read(out)
    assert len(trace.positions) == 6
    assert trace.header.options["k"] == 3
    assert trace.header.options["sampling"]["seed"] == 4
    assert [path.name for path in out.parent.iterdir()] == ["t"]


def test_json_is_one_line_of_what_was_recorded(record: Cli, tiny_store: Path, tmp_path: Path) -> None:
    code, said, _ = record(tiny_store, "-o", tmp_path / "t", *PROMPT, "--json")
    assert code == 0
    assert said.count("\n") == 1
    summary = json.loads(said)
    trace = RoutingTrace.read(tmp_path / "t")
    assert summary["trace"] == str(tmp_path / "t")
    assert summary["size_bytes"] == (tmp_path / "t").stat().st_size
    assert summary["positions"] == len(trace.positions) == 6
    assert summary["rounds"] == len(trace.rounds)
    assert summary["finish_reason"] == "length"


def test_a_chat_is_recorded_as_a_chat(record: Cli, tiny_store: Path, tmp_path: Path) -> None:
    plain, chat = (
        json.loads(record(tiny_store, "-o", tmp_path / str(number), *PROMPT, *extra, "--json")[1])["prompt_tokens"]
        for number, extra in enumerate([(), ("--system", "Be brief.")])
    )
    assert chat > plain


@pytest.mark.parametrize(
    ("out", "options", "expected"),
    [
        ("here", (), "here exists already; remove it, or choose another --out"),
        ("link", (), "link is a link to nothing; remove it"),
        ("here/t", (), "cannot be written (Not a directory)"),
        ("n" * 300, (), "cannot be written (File name too long)"),
        ("t", ("--rows", "1"), "an engine of 1 row never drafts; load with rows of 17, 33 or 65"),
        ("t", ("--k", "99"), "k=99 needs 100 rows"),
        ("new folder/t", ("--temperature", "-1"), "temperature must be"),
    ],
)
def test_what_cannot_become_a_trace_is_refused_before_anything_is_loaded(
    record: Cli,
    tiny_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    out: str,
    options: tuple[str, ...],
    expected: str,
) -> None:
    (tmp_path / "here").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(moespeq.api, "load", lambda *_, **__: pytest.fail("it was loaded"))
    code, said, err = record(tiny_store, "--out", tmp_path / out, *PROMPT, *options)
    assert (code, said) == (2, "")
    assert err.startswith("moespeq: ")
    assert err.count("\n") == 1
    assert expected in err
    assert (tmp_path / "here").read_text() == "mine"
    assert not (tmp_path / "new folder").exists()


def test_a_prompt_that_is_refused_leaves_no_file(record: Cli, tiny_store: Path, tmp_path: Path) -> None:
    code, _, err = record(tiny_store, "--out", tmp_path / "t", "-p", "", "--device", "cpu")
    assert (code, err) == (2, "moespeq: The prompt is empty; give at least one character.\n")
    assert not (tmp_path / "t").exists()


def test_one_file_cannot_be_trace_and_time_line(record: Cli, tiny_store: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    code, said, err = record(tiny_store, "--out", tmp_path / "t", "--timeline", tmp_path / "a" / ".." / "t", *PROMPT)
    assert (code, said) == (2, "")
    assert "are both" in err
    assert not (tmp_path / "t").exists()
