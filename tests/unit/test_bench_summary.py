"""The figures of benchmarks follow from their runs as the formulas say."""

from __future__ import annotations

import pytest

from activity import summarize_trace
from benchmark_results import GB, make_result, make_run
from summary import identical, spread, summarize_result, summarize_runs, summarize_ttft
from tables import runs_table

LINK = {"as-is": 50 * GB}


def entry_of(result: dict, row: str, link: str) -> dict:
    return next(each for each in result["summary"] if (each["row"], each["link"]) == (row, link))


def test_tpot_leaves_the_first_token_out_and_the_floor_is_bytes_over_bandwidth() -> None:
    (entry,) = summarize_runs([make_run("nested", "as-is", 0, 1.0)], LINK)
    assert entry["tpot_s"]["median"] == pytest.approx(0.1)
    assert entry["bytes_per_tok"]["median"] == GB
    assert entry["floor_tpot_s"] == pytest.approx(0.02)
    assert entry["ratio"] == pytest.approx(5.0)


def test_speedup_is_paired_by_prompt() -> None:
    result = make_result()
    assert entry_of(result, "nested", "as-is")["speedup"] == pytest.approx(2.0)  # of 2, 2 and 0.5
    assert entry_of(result, "nested", "25GB")["speedup"] == pytest.approx(2.0)  # only the prompt that ran
    assert entry_of(result, "on_demand", "as-is")["speedup"] == 1.0


def test_a_paced_link_has_its_own_floor() -> None:
    result = make_result()
    assert result["floor"]["link_bytes_per_s"] == {"as-is": 50 * GB, "25GB": 25 * GB}
    assert entry_of(result, "nested", "25GB")["floor_tpot_s"] == pytest.approx(0.04)


def test_rounds_give_acceptance_draft_verify_and_utilisation() -> None:
    entry = entry_of(make_result(), "nested", "as-is")
    assert entry["committed_per_round"] == 5
    assert entry["acceptance"] == 1
    assert entry["draft_s_per_tok"] == pytest.approx(0.2 / 10)
    assert entry["verify_s"] == pytest.approx(0.4)
    assert entry["stall_share"] == pytest.approx(0.4 * 3 / 6)
    assert entry["stall_link_utilisation"] == pytest.approx(0.75)
    assert entry["wasted_share"] == pytest.approx(0.1)


def test_a_failed_run_is_a_row_with_its_error() -> None:
    failed = make_run("plain", "as-is", 0, 0.0, error="Out of memory.")
    (entry,) = summarize_runs([failed], LINK)
    assert (entry["runs"], entry["errors"]) == (0, ["Out of memory."])
    result = {**make_result(), "summary": [entry]}
    assert any(line.endswith("Out of memory.") for line in runs_table(result))


def test_ratios_compare_rows_that_both_ran() -> None:
    result = make_result()
    assert result["ratios"] == {"TPOT, accelerate's offload / nested": pytest.approx(10.0)}
    plain = make_run("plain_equal_slots", "as-is", 0, 1.0, decode_link_bytes=20 * GB)
    result["runs"].append(plain)
    summarize_result(result)
    assert result["ratios"]["bytes a token, nested / plain at equal slots"] == pytest.approx(0.5)


def test_identity_names_the_prompts_that_differ() -> None:
    runs = [make_run(row, "as-is", prompt, 1.0) for row in ("nested", "nested_k0") for prompt in range(3)]
    assert identical(runs, ["nested", "nested_k0"])["different_prompts"] == []
    runs[1]["tokens_sha256"] = "others"
    runs[2]["error"] = "failed"
    check = identical(runs, ["nested", "nested_k0"])
    assert (check["prompts"], check["different_prompts"]) == (2, [1])


def test_ttft_floor_counts_what_was_fetched_and_used() -> None:
    runs = [make_run("nested", "as-is", number, 0.0, prompt_tok=64, new_tok=1) for number in range(3)]
    (entry,) = summarize_ttft(runs, 50 * GB)
    assert entry["floor_s"] == pytest.approx(0.18)  # of 10 GB that crossed the link
    assert entry["ratio"] == pytest.approx(0.5 / 0.18)


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5, 1, 3, 2, 4]) == {"median": 3, "q1": 2, "q3": 4}
    assert spread([7]) == {"median": 7, "q1": 7, "q3": 7}
    assert spread([]) is None


def test_a_trace_is_summed_without_counting_an_overlap_twice() -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: int) -> dict:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    found = summarize_trace(
        [
            event("kernel", "a", 0, 100_000),
            event("kernel", "b", 50_000, 100_000),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 100_000, 400_000, bytes=1000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 600_000, 100_000, bytes=5),
            event("cpu_op", "aten::mm", 0, 900_000),
        ],
        wall_s=1.0,
    )
    assert found.kernel_s == pytest.approx(0.15)
    assert found.copy_s == pytest.approx(0.4)
    assert found.both_s == pytest.approx(0.05)
    assert found.idle_s == pytest.approx(0.5)
    assert (found.copied_bytes, found.link_utilisation) == (1000, found.copy_s)
