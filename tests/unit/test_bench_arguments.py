"""What run.py is given is checked first, each fault one sentence; a file is gone on with if it measured the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arguments import Call, build_parser, parse
from benchmark_results import make_result
from moespeq.errors import UsageError
from report import read_results
from result_file import RESULTS, check_same, read_result, write_result
from session import Session


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Arguments of a seed, data and a work folder that are there."""
    (tmp_path / "seed").mkdir()
    (tmp_path / "test.jsonl").write_text("")
    return ["--seed", str(tmp_path / "seed"), "--data", str(tmp_path / "test.jsonl"), "--work", str(tmp_path / "work")]


def called(*arguments: str) -> Call:
    return parse(build_parser("about"), arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rows", "nested,best"), "argument --rows: 'best' is unknown; there are on_demand, "),
        (("--phases", "all"), "argument --phases: 'all' is unknown; there are build, link, "),
        (("--budget", "much"), "argument --budget: 'much' is not a size; write it like 12GiB"),
        (("--links", "fast"), "argument --links: 'fast' is not a size"),
        (("--links", "as-is,0"), "argument --links: a link carries more than 0; write it like 25GB"),
        (("--ttft", "64,"), "argument --ttft: give a whole number of at least 1, not ''"),
        (("--identity", "100"), "argument --identity: write prompts x new tokens like 100x128, not '100'"),
        (("--layers", "0"), "argument --layers: give a whole number of at least 1, not '0'"),
        (("--context", "20000"), "argument --context: give a whole number from 1 to 16384, not '20000'"),
        (("--open-engines", "two"), "argument --open-engines: give a whole number of at least 1, not 'two'"),
        (("--seed", "none"), "argument --seed: no folder none"),
        (("--data", "none"), "argument --data: no file none"),
        (("--work", "FILE"), "argument --work: no folder "),
        (("--rows", "plain,draft_only"), "none of the rows plain, draft_only runs on a CPU"),
        (("--out", str(RESULTS / "smoke.json")), "argument --out: a smoke run's result does not belong into"),
        (("--rest",), "unrecognized arguments: --rest"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    files: list[str], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    given = [files[3] if word == "FILE" else word for word in arguments]
    with pytest.raises(SystemExit) as ended:
        called("--shape", "smoke", "--device", "cpu", *files, *given)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert sentence in said


def test_without_a_gpu_the_way_to_a_smoke_run_is_named(
    files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        called("--shape", "qwen1.5-moe", *files)
    assert "no CUDA GPU is visible; with --device cpu the script runs" in capsys.readouterr().err


def test_results_of_a_smoke_run_lie_in_the_work_folder(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    work = Path(files[5])
    assert called("--shape", "smoke", *files).out == work / "smoke.json"
    assert called("--shape", "phi-3.5-moe", "--device", "cpu", *files).out == work / "phi-3.5-moe.json"
    assert called("--shape", "phi-3.5-moe", *files).out == RESULTS / "phi-3.5-moe.json"
    assert called("--shape", "phi-3.5-moe", *files, "--out", "other.json").out == Path("other.json")


def test_rows_of_plain_records_are_left_out_on_a_cpu(files: list[str]) -> None:
    options = called("--shape", "smoke", "--device", "cpu", *files, "--rows", "on_demand,nested,plain").options
    assert options.rows == ["nested"]
    assert options.left_out == {"on_demand": "not on a CPU", "plain": "not on a CPU"}


def session(files: list[str], out: Path, *arguments: str, commit: str = "abc", mix: bool = False) -> Session:
    options = called("--shape", "smoke", "--device", "cpu", *files, *arguments).options
    return Session(options, out, commit=commit, may_mix_commits=mix)


@pytest.mark.parametrize(
    ("arguments", "commit", "sentence"),
    [
        (("--budget", "2GiB"), "abc", "with --budget 268435456 (256.00 MiB), and this call has 2147483648 ("),
        (("--context", "512"), "abc", "with --context None, and this call has 512"),
        (("--layers", "4"), "abc", "with --shape smoke, and this call has smoke-4-layers"),
        ((), "def", "with --commit abc, and this call has def; give --commit abc, another --out, or --mix-commits"),
    ],
)
def test_a_file_of_another_measurement_is_not_gone_on_with(
    files: list[str], tmp_path: Path, arguments: tuple[str, ...], commit: str, sentence: str
) -> None:
    out = tmp_path / "smoke.json"
    session(files, out).save()
    before = out.read_text()
    with pytest.raises(UsageError) as caught:
        session(files, out, *arguments, commit=commit)
    assert sentence in str(caught.value)
    assert out.read_text() == before


def test_another_seed_is_another_measurement_and_another_device_too(tmp_path: Path) -> None:
    known = make_result()
    check_same(tmp_path, known, known, may_mix_commits=False)
    for change, sentence in (
        ({"device": {"name": "Other GPU"}}, "with --device Some GPU, and this call has Other GPU"),
        ({"shape": "phi-3.5-moe"}, "with --shape qwen1.5-moe, and this call has phi-3.5-moe"),
    ):
        with pytest.raises(UsageError, match=sentence):
            check_same(tmp_path, known, {**known, **change}, may_mix_commits=True)
    with pytest.raises(UsageError, match="with --seed a, and this call has b"):
        check_same(tmp_path, {"seed": "a"}, {"seed": "b"}, may_mix_commits=False)


def test_the_same_measurement_is_gone_on_with_and_commits_mix_where_that_is_asked_for(
    files: list[str], tmp_path: Path
) -> None:
    first = session(files, tmp_path / "smoke.json")
    first.finish_phase("build", 1.0)
    again = session(files, tmp_path / "smoke.json", commit="def", mix=True)
    again.finish_phase("link", 1.0)
    phases: dict[str, Any] = again.result["phases"]
    assert {name: phase["commit"] for name, phase in phases.items()} == {"build": "abc", "link": "def"}


def test_a_file_of_another_schema_is_refused_by_whoever_reads_it(tmp_path: Path) -> None:
    for content, sentence in (
        (json.dumps({**make_result(), "schema": 9}), "has schema 9 and this version reads 1; measure it again"),
        ("[]", "has schema None"),
        ("{", "is no result file"),
    ):
        (tmp_path / "qwen1.5-moe.json").write_text(content)
        with pytest.raises(UsageError, match=sentence):
            read_result(tmp_path / "qwen1.5-moe.json")
        with pytest.raises(UsageError, match=sentence):
            read_results(tmp_path)


def test_a_result_is_written_with_a_line_for_each_run(tmp_path: Path) -> None:
    result = {"schema": 1, "runs": [{"row": "nested"}, {"row": "plain"}], "rows": [1, 2]}
    write_result(tmp_path / "new" / "a.json", result)
    assert read_result(tmp_path / "new" / "a.json") == result
    assert (tmp_path / "new" / "a.json").read_text().count("\n") == 8
