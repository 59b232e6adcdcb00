"""Whatever is wrong with what a person gives, the answer is one sentence on stderr, exit code 2, and no traceback."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import moespeq.api
from engines import memory_for
from families import make_tiny
from moespeq.cli.main import run
from moespeq.config import format_at_least

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Runs `moespeq`, checks that it refuses as it should, and returns the sentence."""
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["moespeq", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        assert ended.value.code == 2
        assert captured.out == ""
        assert captured.err.startswith("moespeq: ")
        assert captured.err.endswith("\n")
        assert captured.err.count("\n") == 1
        assert "Traceback" not in captured.err
        return captured.err.removeprefix("moespeq: ").rstrip()

    return call


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "damaged checkpoint")


@pytest.fixture
def store(tiny_store: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(tiny_store, tmp_path / "damaged store")


def test_a_folder_that_does_not_exist(refused: Refused, tmp_path: Path) -> None:
    for command in (("run", "-p", "x"), ("prepare",), ("info",)):
        sentence = refused(command[0], tmp_path / "none", *command[1:])
        assert f"{tmp_path / 'none'}" in sentence
    assert "no manifest.json" in refused("verify", tmp_path / "none")


def test_a_folder_that_is_no_checkpoint(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    for command in (("run", "-p", "x"), ("prepare",), ("info",)):
        assert "neither model.safetensors nor" in refused(command[0], tmp_path, *command[1:])


def test_a_dense_model(refused: Refused, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    sentence = refused("run", tmp_path / "llama", "-p", "x")
    assert "'llama' is dense: it has no routed experts to offload" in sentence
    assert "info --families" in sentence


def test_a_family_no_test_proves(refused: Refused, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    assert "No test proves model type 'qwen3' yet" in refused("prepare", checkpoint)
    (checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert "quantised (gptq)" in refused("run", checkpoint, "-p", "x")


def test_a_truncated_shard(refused: Refused, checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-5])
    assert shard.name in refused("prepare", checkpoint)
    assert shard.name in refused("run", checkpoint, "-p", "x")
    shard.unlink()
    assert shard.name in refused("prepare", checkpoint)


def test_a_record_with_a_flipped_bit(refused: Refused, store: Path) -> None:
    data = bytearray((store / "experts.bin").read_bytes())
    for position in range(50, len(data), 1000):
        data[position] ^= 16
    (store / "experts.bin").write_bytes(data)
    assert "experts.bin" in refused("run", store, "-p", "A router", "-n", "4")
    assert "experts.bin" in refused("verify", store)


def test_a_store_of_another_schema(refused: Refused, store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    for command in (("run", "-p", "x"), ("info",), ("verify",), ("export", store / "out")):
        sentence = refused(command[0], store, *command[1:])
        assert "schema" in sentence
        assert "99" in sentence


def test_a_store_with_a_missing_or_cut_file(refused: Refused, store: Path) -> None:
    (store / "base.bin").write_bytes((store / "base.bin").read_bytes()[:-1])
    assert "base.bin has" in refused("run", store, "-p", "x")
    (store / "base.bin").unlink()
    assert "base.bin is missing" in refused("run", store, "-p", "x")


def test_a_budget_too_small_names_the_missing_amount(refused: Refused, tiny_store: Path) -> None:
    least_bytes = memory_for(tiny_store, 1, records="whole")  # with no base resident, which is the least of all
    sentence = refused("run", tiny_store, "-p", "x", "--device-memory", least_bytes - 100_000)
    assert "97.66 KiB too small" in sentence
    assert f"give at least {format_at_least(least_bytes)}" in sentence


def test_a_context_longer_than_the_model_was_made_for(refused: Refused, tiny_store: Path) -> None:
    assert "at most 512" in refused("run", tiny_store, "-p", "x", "--ctx-size", "513")


def test_prompts_that_cannot_be_answered(refused: Refused, tiny_store: Path) -> None:
    assert "The prompt is empty" in refused("run", tiny_store, "-p", "")
    sentence = refused("run", tiny_store, "-p", "many words " * 20, "--ctx-size", "32")
    assert "and the context 32" in sentence
    assert "not valid UTF-8" in refused("run", tiny_store, "-p", "caf\udce9")
    assert "not valid UTF-8" in refused("run", tiny_store, "--chat", "-p", "caf\udce9")
    refusal = refused("run", tiny_store, "--system", "caf\udce9", "-p", "Hello")
    assert "The system message is not valid UTF-8 at character 3; convert it first." in refusal


def test_a_model_without_a_chat_template(refused: Refused, checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    assert "no chat template" in refused("run", checkpoint, "-p", "x", "--chat")


@pytest.fixture
def hub_id(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model of an offline hub whose small files are there and whose weights are not."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, revision = tmp_path / "hub" / "models--org--tiny", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    ignored = shutil.ignore_patterns("*.safetensors", "chat_template.jinja")
    shutil.copytree(tiny_checkpoint, repository / "snapshots" / revision, ignore=ignored)
    return "org/tiny"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("chat",), "no chat template"),
        (("run", "-p", "x", "--chat"), "no chat template"),
        (("trace", "record", "--out", "t", "-p", "x", "--system", "Be brief."), "no chat template"),
        (("run", "-p", "x", "--temperature", "-1"), "temperature must be"),
        (("chat", "--top-p", "1.5"), "top_p must be"),
        (("run", "-p", "x", "--k", "17", "--device", "cpu"), "but rows is 17"),
        (("run", "-p", "x", "--rows", "18"), "rows must be one of"),
    ],
)
def test_what_the_small_files_tell_is_refused_before_anything_is_loaded(
    refused: Refused,
    checkpoint: Path,
    tiny_store: Path,
    hub_id: str,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    expected: str,
) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    monkeypatch.setattr(moespeq.api, "load", lambda *_, **__: pytest.fail("it was loaded"))
    for model in (checkpoint, hub_id) if "template" in expected else (checkpoint, hub_id, tiny_store):
        assert expected in refused(*arguments, model)


def test_an_output_that_is_taken(refused: Refused, tiny_checkpoint: Path, tiny_store: Path, tmp_path: Path) -> None:
    assert "exists already" in refused("prepare", tiny_checkpoint, "--out", tiny_store)
    assert "is the checkpoint itself" in refused("prepare", tiny_checkpoint, "--out", tiny_checkpoint)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "choose an empty folder" in refused("export", tiny_store, tmp_path / "out")


def test_verifying_against_another_checkpoint(refused: Refused, tiny_store: Path, tmp_path: Path) -> None:
    other = make_tiny("olmoe", tmp_path / "other")
    assert "was not made from" in refused("verify", tiny_store, "--against", other)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("runn",), "No such command 'runn'. Did you mean 'run'?"),
        (("run", "m", "--promt", "x"), "No such option: --promt. Did you mean '--prompt'?"),
        (("run", "m", "-p", "x", "--device-memry", "1"), "Did you mean '--device-memory'?"),
        (
            ("run", "m", "-p", "x", "--zebra"),
            "No such option: --zebra; `moespeq run --help` lists arguments and options.",
        ),
        (("run",), "Missing argument 'MODEL'; `moespeq run --help` lists"),
        (("trace", "record"), "`moespeq trace record --help` lists"),
        (("--zebra",), "No such option: --zebra; `moespeq --help` lists commands."),
        (("run", "m"), "Missing option '--prompt'"),
        (("run", "m", "n", "-p", "x"), "unexpected extra argument"),
        (("run", "m", "-p", "x", "--rows", "many"), "Invalid value for '--rows'"),
        (("run", "m", "-p", "x", "--temperature", "hot"), "Invalid value for '--temperature'"),
        (("demo", "--questions", "0"), "greater than or equal to 1"),
        (("demo", "--max-new-tokens", "0"), "greater than or equal to 1"),
    ],
)
def test_a_command_line_that_makes_no_sense(refused: Refused, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refused(*arguments)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--k", "many", "k must be 'auto' or a whole number from 0 to 16, got 'many'"),
        ("--k", "-1", "from 0 to 16, got -1"),
        ("--k", "\u00b2", "from 0 to 16, got '\u00b2'"),
        ("--k", "--5", "from 0 to 16, got '--5'"),
        ("--k", "17", "but rows is 17; load with rows=33 (--rows 33)"),
        ("--k", "99", "k=99 needs 100 rows and the most are 65; k is at most 64"),
        ("--rows", "18", "rows must be one of 1, 17, 33, 65, got 18"),
        ("--device-memory", "lots", "'lots' is not a size"),
        ("--base-memory", "some", "'some' is not a size"),
        ("--host-memory", "1 apple", "'1 apple' is not a size"),
        ("--host-memory", "1000TiB", "The host cache of 1000.00 TiB is larger than"),
        ("--device-memory", "9" * 400, "A size must be below 8 EiB"),
        ("--link-bandwidth", "9" * 400, "A size must be below 8 EiB"),
        ("--threads", "100000", "threads must be at most"),
        ("--link-bandwidth", "0", "above 0 bytes/s"),
        ("--ctx-size", "0", "ctx_size must be a whole number of at least 1"),
        ("--threads", "0", "threads must be a whole number of at least 1"),
        ("--mode", "fast", "use 'speculative' or 'on_demand'"),
        ("--max-new-tokens", "0", "max_new_tokens must be a whole number of at least 1"),
        ("--min-new-tokens", "1000", "min_new_tokens must be a whole number from 0 to 256"),
        ("--temperature", "-1", "temperature must be 0 (greedy) or"),
        ("--top-k", "-1", "top_k must be"),
        ("--top-p", "1.5", "top_p must be above 0 and at most 1"),
        ("--min-p", "2", "min_p must be from 0 to 1"),
        ("--repetition-penalty", "0", "repetition_penalty must be above 0"),
        ("--seed", "-1", "seed must be a whole number from 0"),
        ("--acceptance", "typical", "'coupled' or 'rejection'"),
        ("--stop", "", "stop must be"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(
    refused: Refused, tiny_store: Path, option: str, value: str, expected: str
) -> None:
    assert expected in refused("run", tiny_store, "-p", "x", "--device", "cpu", option, value)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--format", "plan", "Did you mean 'plain'?"),
        ("--bits", "9", "2, 3 or 4 bits a code, not 9"),
        ("--group", "0", "at least 1 weight, not 0"),
    ],
)
def test_a_store_format_that_does_not_exist(
    refused: Refused, tiny_checkpoint: Path, tmp_path: Path, option: str, value: str, expected: str
) -> None:
    assert expected in refused("prepare", tiny_checkpoint, "--out", tmp_path / "new", option, value)
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--k", "99", "k=99 needs 100 rows"),
        ("--device-memory", "1KB", "too small"),
        ("--link-bandwidth", "0", "above 0 bytes/s"),
        ("--seed", "-1", "seed must be a whole number"),
    ],
)
def test_demo_refuses_before_it_prints_a_question(refused: Refused, option: str, value: str, expected: str) -> None:
    assert expected in refused("demo", option, value)


def test_a_path_the_system_refuses(refused: Refused) -> None:
    assert "File name too long: 'aaa" in refused("verify", "a" * 300)
    assert "File name too long" in refused("run", "a" * 5000, "-p", "x")
