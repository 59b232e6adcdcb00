"""The benchmark script runs from a seed to a result file, on the CPU and the packaged demo model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from families import make_tiny
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.prepare import prepare_store
from run import main
from shapes import Factors
from synthetic_store import files_of
from wide_store import build_store, generated_checkpoint
from widen import WideModel, write_checkpoint

FACTORS = Factors(hidden=2, inner=2, heads=1)
Script = Callable[..., dict[str, Any]]


def test_a_generated_store_is_the_store_of_the_written_checkpoint(tmp_path: Path) -> None:
    seed = make_tiny("mixtral", tmp_path / "seed")
    write_checkpoint(WideModel(seed, FACTORS), tmp_path / "wide")
    prepared = files_of(prepare_store(tmp_path / "wide", tmp_path / "prepared"))
    generated = files_of(build_store(WideModel(seed, FACTORS), tmp_path / "generated", spill=tmp_path / "spilled"))
    assert (tmp_path / "spilled" / "base.bin").read_bytes() == prepared["base.bin"]
    for name in ("base.bin", "experts.bin", "records.bin", "model/config.json"):
        assert generated[name] == prepared[name]


def test_any_part_of_a_generated_tensor_can_be_read(tmp_path: Path) -> None:
    model = WideModel(make_tiny("mixtral", tmp_path / "seed"), FACTORS)
    (file,) = generated_checkpoint(model, tmp_path / "small").files
    for entry in (file.entries[0], file.entries[7], file.entries[-1]):
        whole = file.read(entry.offset, entry.num_bytes).tobytes()
        assert file.read(entry.offset + 10, 20).tobytes() == whole[10:30]


@pytest.fixture
def run(tmp_path: Path) -> Script:
    """Calls the script on the demo model with more arguments; returns the result file."""
    data, out = tmp_path / "test.jsonl", tmp_path / "smoke.json"
    problems = [(f"What is {n} plus {n}?", f"It is <<{n}+{n}={2 * n}>>{2 * n}.") for n in range(9)]
    data.write_text("\n".join(json.dumps({"question": asked, "answer": answer}) for asked, answer in problems))

    def call(*arguments: str) -> dict[str, Any]:
        files = ["--seed", str(MODEL_FOLDER), "--data", str(data), "--work", str(tmp_path), "--out", str(out)]
        sizes = ["--device", "cpu", "--context", "512", "--new-tokens", "4", "--links", "as-is"]
        main(["--shape", "smoke", *files, *sizes, "--commit", "abc", *arguments])
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    return call


def test_a_phase_may_load_its_engines_otherwise_and_says_so(run: Script) -> None:
    sizes = ["--context", "64", "--budget", "64MB", "--ttft", "80", "--identity", "1x4", "--identity-budget", "80MB"]
    result = run("--phases", "build,link,rows,ttft,identity", *sizes, "--rows", "nested", "--repetitions", "1")
    assert result["changed_options"] == {"ttft": {"ctx_size": 81}, "identity": {"device_memory": 80_000_000}}
    assert [measured["prompt_tok"] for measured in result["ttft"] if measured["error"] is None] == [80] * 3
    assert result["engines"]["nested"]["plan"]["context_tok"] == 64
    assert result["identity_check"] == {"rows": ["nested", "nested_k0"], "prompts": 1, "different_prompts": []}


def test_the_script_measures_rows_ttft_and_identity(run: Script) -> None:
    rows = ["--budget", "64MB", "--rows", "nested,nested_k0", "--open-engines", "2", "--repetitions", "2"]
    result = run("--phases", "build,link,rows,ttft", *rows, "--ttft", "20")
    assert result["interleaved_rows"]["runs"] == [["nested", "nested_k0"]]
    order = [(measured["row"], measured["prompt"]) for measured in result["runs"]]
    assert order == [("nested", 0), ("nested_k0", 0), ("nested", 1), ("nested_k0", 1)]
    assert {measured["error"] for measured in result["runs"]} == {None}
    assert result["same_tokens"] == {"rows": ["nested", "nested_k0"], "prompts": 2, "different_prompts": []}
    assert {entry["prompt_tok"] for entry in result["ttft_summary"]} == {20}

    result = run("--budget", "64MB", "--phases", "identity", "--identity", "1x4")
    assert result["identity_check"]["prompts"] == 1
    assert len(result["runs"]) == 4, "what an earlier call measured stays"
    assert set(result["phases"]) == {"build", "link", "rows", "ttft", "identity"}


def test_accelerate_is_timed_on_the_written_checkpoint(run: Script) -> None:
    pytest.importorskip("accelerate")
    result = run("--phases", "build,accelerate", "--accelerate-tokens", "2")
    assert result["accelerate"]["new_tok"] == 2
    assert result["accelerate"]["tpot_s"] > 0


def test_plain_rows_are_marked_and_not_failed_on_a_cpu(run: Script, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["--budget", "64MB", "--rows", "on_demand,nested_k0", "--repetitions", "1"]
    result = run("--phases", "build,link,rows", *rows)
    assert [(measured["row"], measured["error"]) for measured in result["runs"]] == [("nested_k0", None)]
    assert result["left_out"] == {"on_demand": "not on a CPU"}
    printed = capsys.readouterr().out
    assert "Failed" not in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("| on demand, plain records, LRU"))
    assert "not on a CPU" in line


def test_a_call_that_would_mix_measurements_is_one_sentence(run: Script, capsys: pytest.CaptureFixture[str]) -> None:
    run("--budget", "64MB", "--phases", "build")
    for arguments, sentence in (
        (("--budget", "65MB", "--phases", "link"), "this call has 65000000 (61.99 MiB); give --budget 64000000"),
        (("--budget", "64MB", "--commit", "def", "--phases", "link"), "--commit abc, another --out, or --mix-commits"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(*arguments)
        said = capsys.readouterr().err
        assert (ended.value.code, said.count("\n")) == (2, 1)
        assert sentence in said
    run("--budget", "64MB", "--commit", "def", "--mix-commits", "--phases", "link")


def test_measuring_before_anything_is_built_is_one_sentence(run: Script, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--phases", "link")
    assert "has no store of smoke yet; begin with --phases build" in capsys.readouterr().err


def test_a_row_that_cannot_run_is_recorded_as_failed(run: Script) -> None:
    result = run("--budget", "1MB", "--rows", "nested", "--repetitions", "1", "--phases", "build,link,rows")
    (failed,) = result["runs"]
    assert failed["error"].startswith("The memory budget of")
    assert result["summary"][0]["runs"] == 0
