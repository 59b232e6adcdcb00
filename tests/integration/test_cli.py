"""The command line as a person or a program meets it: text on stdout, one JSON line where asked for, and the rest on stderr."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moespeq import __version__
from moespeq.cli.main import COMMANDS, run

Cli = Callable[..., tuple[int, str, str]]
PROMPT = ("--prompt", "A router sends every token", "--max-new-tokens", "12", "--ignore-eos")
RUN_KEYS = {
    "text",
    "tokens",
    "finish_reason",
    "rounds",
    "drafted",
    "accepted",
    "committed_per_round",
    "link_bytes",
    "hits",
    "late",
    "misses",
    "wasted_bytes",
    "rows",
}


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Runs `moespeq` in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moespeq", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def spawn(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """`moespeq` in a process of its own."""
    command = [sys.executable, "-m", "moespeq", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def only_json(out: str) -> dict[str, Any]:
    """The object of a stdout that is exactly one line of JSON."""
    assert out.count("\n") == 1
    assert out.endswith("\n")
    value: dict[str, Any] = json.loads(out)
    return value


def test_run_streams_the_answer_to_stdout_and_figures_to_stderr(cli: Cli, tiny_store: Path) -> None:
    code, out, err = cli("run", tiny_store, *PROMPT, "--k", "4")
    assert code == 0
    assert out.strip()
    assert "12 tokens (length)" in err
    assert "seed" in err


def test_run_with_json_prints_one_line_and_the_text_goes_to_stderr(cli: Cli, tiny_store: Path) -> None:
    code, text, _ = cli("run", tiny_store, *PROMPT, "--k", "4")
    code, out, err = cli("run", tiny_store, *PROMPT, "--k", "4", "--json")
    value = only_json(out)
    assert code == 0
    assert set(value) >= RUN_KEYS
    assert value["text"] + "\n" == text == err
    assert len(value["tokens"]) == 12
    assert (value["finish_reason"], value["rows"]) == ("length", 17)
    assert value["drafted"] >= value["accepted"]
    assert sum(value["link_bytes_by_cause"].values()) == value["link_bytes"] > 0


def test_k_changes_the_rounds_and_never_the_text(cli: Cli, tiny_store: Path) -> None:
    plain, speculative = (only_json(cli("run", tiny_store, *PROMPT, "--k", k, "--json")[1]) for k in (0, 4))
    assert plain["tokens"] == speculative["tokens"]
    assert (plain["drafted"], plain["rounds"]) == (0, 11)
    assert speculative["rounds"] < 11


def test_a_reported_seed_repeats_its_text(cli: Cli, tiny_store: Path) -> None:
    hot = ("run", tiny_store, *PROMPT, "--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--json")
    first = only_json(cli(*hot)[1])
    assert only_json(cli(*hot, "--seed", first["seed"])[1])["tokens"] == first["tokens"]


def test_a_prompt_is_read_from_standard_input(cli: Cli, tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (PROMPT[1].encode(), b"\xff\xfe"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        code, out, err = cli("run", tiny_store, "--prompt", "-", *PROMPT[2:], "--json")
        if code == 0:
            assert only_json(out)["tokens"] == only_json(cli("run", tiny_store, *PROMPT, "--json")[1])["tokens"]
    assert (code, err) == (2, "moespeq: The prompt is not valid UTF-8 at character 0; convert it first.\n")


def test_a_chat_takes_a_system_message(cli: Cli, tiny_store: Path) -> None:
    plain, chat, system = (
        only_json(cli("run", tiny_store, *PROMPT, *extra, "--json")[1])["prompt_tokens"]
        for extra in ((), ("--chat",), ("--system", "Be brief."))
    )
    assert plain < chat < system


def test_run_prepares_a_checkpoint_once_and_then_uses_its_store(
    cli: Cli, tiny_checkpoint: Path, tiny_store: Path, tmp_path: Path
) -> None:
    code, out, err = cli("run", tiny_checkpoint, *PROMPT, "--json")
    assert code == 0
    assert only_json(out)["tokens"] == only_json(cli("run", tiny_store, *PROMPT, "--json")[1])["tokens"]
    (store,) = (tmp_path / "cache").iterdir()
    assert store.name.startswith("checkpoint-")
    assert "layer 3 of 3" in err or "checksums" in err
    made = (store / "experts.bin").stat()
    code, out, err = cli("run", tiny_checkpoint, *PROMPT, "--json")
    assert code == 0
    assert "layer" not in err.replace(only_json(out)["text"], "")
    assert (store / "experts.bin").stat().st_mtime_ns == made.st_mtime_ns
    assert list((tmp_path / "cache").iterdir()) == [store]


def test_a_checkpoint_goes_through_prepare_verify_info_export(cli: Cli, tiny_checkpoint: Path, tmp_path: Path) -> None:
    store, copy = tmp_path / "a [store]", tmp_path / "copy"
    code, out, _ = cli("prepare", tiny_checkpoint, "--out", store, "--format", "code-width", "--json")
    assert (code, only_json(out)["store"], only_json(out)["format"]) == (0, str(store), "code-width")
    code, out, _ = cli("verify", store, "--against", tiny_checkpoint, "--json")
    assert (code, only_json(out)["intact"]) == (0, True)
    code, out, _ = cli("info", store, "--json")
    assert (code, only_json(out)["kind"], only_json(out)["family"]) == (0, "store", "qwen3_moe")
    code, out, _ = cli("info", tiny_checkpoint, "--json")
    assert (code, only_json(out)["kind"]) == (0, "checkpoint")
    code, out, _ = cli("export", store, copy, "--json")
    assert code == 0
    for name in only_json(out)["files"]:
        assert (copy / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_the_same_commands_speak_to_people_without_losing_brackets(
    cli: Cli, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    store = tmp_path / "a [store]"
    for arguments, expected in (
        (("prepare", tiny_checkpoint, "--out", store), f"{store}: 1.1"),
        (("verify", store), f"{store} is intact"),
        (("info", store), "qwen3_moe"),
        (("export", store, tmp_path / "[copy]"), "[copy]: 18 files, byte-identical"),
    ):
        code, out, _ = cli(*arguments)
        assert code == 0
        assert expected in out


def test_demo_compares_plain_speculative_and_on_demand(cli: Cli) -> None:
    few = ("--questions", "1", "--max-new-tokens", "10", "--link-bandwidth", "1GB")
    code, out, err = cli("demo", *few, "--json")
    value = only_json(out)
    assert code == 0
    assert value["identical"] is True
    assert set(value["routes"]) == {"exact", "same_set", "wrong"}
    assert set(value) >= {*RUN_KEYS, "link_bytes_on_demand"}
    assert [answer["name"] for answer in value["passes"]] == ["plain (k=0)", "speculative (k=16)", "on demand (LRU)"]
    assert len(value["tokens"]) == 10
    assert "Question 1" in err
    code, out, _ = cli("demo", *few)
    assert code == 0
    assert "identical, token for token" in out


def test_help_and_version_answer_at_once_and_without_torch() -> None:
    code = "import sys; from moespeq.cli.main import run\ntry: run()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    for option, expected in (("--help", "demo"), ("--version", __version__), ("run --help", "--link-bandwidth")):
        taken_s = []
        for _ in range(3):
            begin_s = time.monotonic()
            command = [sys.executable, "-c", code, *option.split()]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken_s.append(time.monotonic() - begin_s)
            if taken_s[-1] < 1:
                break
        assert expected in done.stdout
        assert done.stderr == "False\n"
        assert min(taken_s) < 1


@pytest.mark.parametrize("columns", ["20", "60", "250"])
def test_help_fits_any_terminal(columns: str) -> None:
    environment = {**os.environ, "COLUMNS": columns}
    out, err = spawn("--help", env=environment).communicate(timeout=60)
    assert (err, max(map(len, out.splitlines())) <= int(columns)) == ("", True)
    assert all(name in out for name in COMMANDS)


def test_an_interrupt_ends_with_130_and_no_traceback(tiny_store: Path) -> None:
    slow = ("--link-bandwidth", "200kB", "--device-memory", "3500000")
    process = spawn("run", tiny_store, "-p", "text", "-n", "400", "--ignore-eos", *slow)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error_worth_a_word(tiny_store: Path) -> None:
    process = spawn("run", tiny_store, "-p", "text", "-n", "200", "--ignore-eos")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) != 0
