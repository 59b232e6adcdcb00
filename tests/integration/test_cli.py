"""The command line as people and programs meet it: text on stdout, or one JSON line; everything else on stderr."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import memory_for
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


def test_where_nothing_is_drafted_nothing_is_said_of_drafts(cli: Cli, tiny_store: Path) -> None:
    _, out, err = cli("run", tiny_store, *PROMPT, "--k", "0", "--json", "--log-level", "info")
    assert only_json(out)["acceptance"] is None
    assert "a text is generated" in err
    assert "acceptance" not in err
    assert "1.00 committed a round, nothing drafted" in cli("run", tiny_store, *PROMPT, "--k", "0")[2]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_draft_that_does_not_fit_is_missed_aloud(
    cli: Cli, tiny_store: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    prompt = PROMPT if command == "run" else ("-n", "2")
    budget = ("--device", "cpu", "--device-memory", memory_for(tiny_store, 2, records="whole"))
    lost = "decodes without a draft: with all of the base an engine takes at least"
    assert lost in cli(command, tiny_store, *prompt, *budget)[2]
    assert lost not in cli(command, tiny_store, *prompt, *budget, "--k", "0")[2]


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*PROMPT, "--k", "4"), "12 tokens (length)"),
        ((*PROMPT, "--k", "4", "--json", "--log-level", "info"), "a text is generated"),
        ((*PROMPT, "--temperature", "-1"), "temperature"),
        (PROMPT[2:], "Missing option"),
        ((*PROMPT, "--no-such"), "No such option"),
    ],
)
def test_logs_in_json_are_all_that_stderr_has(
    cli: Cli, tiny_store: Path, arguments: tuple[str, ...], said: str
) -> None:
    told = cli("run", tiny_store, *arguments, "--log-format", "json")[2]
    assert any(said in json.loads(line)["message"] for line in told.splitlines()), told
    assert not cli("run", tiny_store, "--no-such")[2].startswith("{")


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
    expected = only_json(cli("run", tiny_store, *PROMPT, "--json")[1])
    made_at_ns = set()
    for _ in range(2):
        code, out, err = cli("run", tiny_checkpoint, *PROMPT, "--json")
        assert (code, err) == (0, expected["text"] + "\n")
        assert only_json(out)["tokens"] == expected["tokens"]
        (store,) = (tmp_path / "cache").iterdir()
        assert store.name.startswith("checkpoint-")
        made_at_ns.add((store / "experts.bin").stat().st_mtime_ns)
    assert len(made_at_ns) == 1


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
        (("prepare", tiny_checkpoint, "--out", store), f"ready for `moespeq run '{store}' -p"),
        (("verify", store), f"{store} is intact"),
        (("info", store), "qwen3_moe"),
        (("export", store, tmp_path / "[copy]"), "[copy]: 18 files, byte-identical"),
    ):
        code, out, _ = cli(*arguments)
        assert code == 0
        assert expected in out
    assert (
        "18 files, byte-identical to the source; 18 of them there already"
        in cli("export", store, tmp_path / "[copy]")[1]
    )


def test_demo_compares_plain_speculative_and_on_demand(cli: Cli) -> None:
    few = ("--questions", "1", "--link-bandwidth", "1GB", "--max-new-tokens")
    code, out, err = cli("demo", *few, "8", "--json")
    value = only_json(out)
    assert code == 0
    assert value["identical"] is True
    assert set(value["routes"]) == {"exact", "same_set", "wrong"}
    assert set(value) >= {*RUN_KEYS, "link_bytes_on_demand"}
    assert len(value["passes"]) == 3
    assert len(value["tokens"]) == 8
    assert "Question 1" in err
    code, out, _ = cli("demo", *few, "2")
    assert code == 0
    assert "identical, token for token" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--help"], "demo"), (["--version"], __version__), (["run", "--help"], "--link-bandwidth")],
)
def test_help_and_version_answer_at_once_and_without_torch(arguments: list[str], expected: str) -> None:
    """Processor time of a second start: neither other work on the machine nor bytecode compilation adds to it."""
    code = "import sys; from moespeq.cli.main import run\ntry: run()\nfinally: print({*sys.modules} & {'torch'})"
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, capture_output=True, check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert expected in out
    assert out.endswith("set()\n")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


@pytest.mark.parametrize("columns", ["60", "80", "250"])
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
    assert err.splitlines()[-1].startswith("moespeq: interrupted")


def test_a_reader_that_goes_away_is_no_error_worth_a_word(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    monkeypatch.setattr(sys, "argv", ["moespeq", "run", str(tiny_store), *PROMPT])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


def test_without_a_command_the_help_is_shown(cli: Cli) -> None:
    code, out, err = cli()
    assert (code, err) == (2, "")
    assert all(name in out for name in COMMANDS)


def test_an_output_without_room_is_one_sentence(tiny_store: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "moespeq", "info", str(tiny_store), "--json"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "moespeq: No space left on device; check the disk and where output goes.\n"


def test_a_terminal_that_knows_only_ascii_is_shown_what_it_can(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "st\u00f6re").symlink_to(tiny_store)
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["moespeq", "verify", str(tmp_path / "st\u00f6re")])
    with pytest.raises(SystemExit) as ended:
        run()
    assert not ended.value.code
    assert b"st\\xf6re" in shown.getvalue()
