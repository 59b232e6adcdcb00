"""docs/benchmarks.md follows from the result files and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_results import make_result
from report import DOCUMENT, RESULTS, document, read_results
from rows import ROWS
from shapes import GIB


def test_the_document_is_what_the_committed_results_give() -> None:
    assert DOCUMENT.read_text() == document(read_results(RESULTS)), "run python benchmarks/report.py"


def test_every_committed_result_names_commit_floor_device_and_shape() -> None:
    for result in read_results(RESULTS):
        assert result["commit"] != "unknown"
        assert result["floor"]["link_bytes_per_s"]
        assert result["device"]["name"]
        assert result["shape"]


def test_a_result_becomes_tables_and_says_what_failed() -> None:
    text = document([json.loads(json.dumps(make_result()))])
    assert "| [qwen1.5-moe](#qwen15-moe) | as-is |" in text
    assert "| transformers + accelerate offload" in text
    assert "Failed: draft of 32, nested records, prefetch, 25GB: The link broke." in text
    assert "4 prompts were compared: identical" in text
    assert "12.00 GB to the device at 20.0 GB/s while copying" in text
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("| draft of 32, nested") and "as-is" in line)
    assert [cell.strip() for cell in row.split("|")][3:9] == ["3", "10.0", "100.00 (150.00)", "20.00", "5.00", "2.00"]


def test_results_come_in_the_order_of_the_shapes(tmp_path: Path) -> None:
    for shape in ("mixtral-8x7b", "phi-3.5-moe-16-layers", "qwen1.5-moe"):
        (tmp_path / f"{shape}.json").write_text(json.dumps(make_result(shape)))
    shapes = [result["shape"] for result in read_results(tmp_path)]
    assert shapes == ["qwen1.5-moe", "phi-3.5-moe-16-layers", "mixtral-8x7b"]


def test_equal_results_give_equal_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from plots import draw

    first, second = (draw(make_result(), tmp_path / name) for name in ("first", "second"))
    assert [path.name for path in first] == ["qwen1.5-moe-tpot.svg", "qwen1.5-moe-ttft.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_rows_of_other_tokens_never_stand_as_equal() -> None:
    result = json.loads(json.dumps(make_result()))
    first, second = result["identity_check"]["rows"]
    for run in result["identity"]:
        if run["row"] == second and run["prompt"] == 1:
            run["tokens_sha256"] = "another text"
    result["identity_check"]["different_prompts"] = [1]
    text = document([result])
    assert f"{ROWS[first].label} = {ROWS[second].label}" not in text
    assert "the groups differ on 1: [1]" in text


def test_a_shape_in_other_memory_is_a_section_of_its_own() -> None:
    usual, small = make_result(), {**make_result(), "budget_bytes": 6 * GIB}
    text = document([usual, small])
    assert "## qwen1.5-moe\n" in text
    assert "## qwen1.5-moe-6-gib\n" in text
    assert "(figures/qwen1.5-moe-6-gib-tpot.svg)" in text
