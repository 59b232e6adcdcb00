"""The deepest draft a latency budget allows by a profile, and caution on slow links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moespeq.config import LoadOptions
from moespeq.decode.tier import governor_for
from moespeq.errors import UsageError
from moespeq.plan import DepthLimits, Machine
from moespeq.plan.depth import deepest_within, distinct_experts, plan_depth, profiled_round_s
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes
from moespeq.residency import AmortizingDepth, FixedDepth
from moespeq.types import ModelShape

GPU = "NVIDIA H200"
TIMES = ModelTimes("qwen", 1e-3, {17: 0.01, 33: 0.02}, 2e12)
PROFILE = MachineProfile(GPU, {1 << 23: 50e9}, {1 << 23: 5e9}, (DiskRate(1, 1e9, True),), (TIMES,))
SHAPE = ModelShape("qwen2_moe", 24, 24, 60, 4, 2048, 1000, 4096, (("up", 1408, 2048),), 1000)


def limits(profile: MachineProfile | None = PROFILE, **named: Any) -> tuple[DepthLimits, dict[str, str]]:
    machine = Machine(
        1 << 40, gpu_free_bytes=1 << 40, gpu=GPU, profile=profile, profile_path=Path("/cache/profile.json")
    )
    reasons: dict[str, str] = {}
    options = LoadOptions(**{"device": "cuda", **named})
    found = plan_depth(
        options,
        machine,
        reasons,
        shape=SHAPE,
        model="qwen",
        slot_bytes=9_000_000,
        num_slots=SHAPE.num_experts * 24 // 4,
    )
    return found, reasons


def test_rows_alone_bound_the_depth_where_nothing_is_asked_for() -> None:
    assert limits() == (DepthLimits(0, 32), {})
    assert limits(None) == (DepthLimits(0, 32), {})
    assert limits(rows=65)[0].k_max == 64


def test_distinct_experts_of_evenly_spread_routes() -> None:
    assert distinct_experts(1, num_experts=60, top_k=4) == pytest.approx(4.0)
    assert distinct_experts(1000, num_experts=60, top_k=4) == pytest.approx(60.0)


def test_a_round_by_the_profile_is_its_drafts_its_verify_and_what_of_the_link_they_do_not_hide() -> None:
    round_s = profiled_round_s(TIMES, SHAPE, s_per_distinct=1e-3)
    assert round_s(0) == pytest.approx(0.01 + 4e-3)
    hidden = profiled_round_s(TIMES, SHAPE, s_per_distinct=1e-6)
    assert hidden(24) == pytest.approx(0.025 + 0.015), "half way between 17 and 33 rows"
    assert hidden(64) == pytest.approx(0.065 + 0.02), "level past what was measured"


def test_the_deepest_draft_is_the_last_whose_round_stays_within_the_budget() -> None:
    assert deepest_within(0.5, lambda k: 0.1 * k, k_min=0, k_max=32) == 5
    assert deepest_within(9.0, lambda k: 0.1 * k, k_min=0, k_max=32) == 32
    assert deepest_within(0.0, lambda k: 1.0, k_min=0, k_max=32) == 0
    assert deepest_within(0.0, lambda k: 1.0, k_min=3, k_max=32) == 3


def test_a_latency_budget_cuts_the_depth_and_says_why() -> None:
    found, reasons = limits(itl_budget_ms=60)
    assert 0 < found.k_max < 32
    assert found.round_budget_s == 0.06
    assert reasons["k_max"].startswith(f"{found.k_max}: its round takes ")
    assert "/cache/profile.json" in reasons["k_max"]
    deeper, _ = limits(itl_budget_ms=120)
    assert found.k_max < deeper.k_max


def test_a_budget_no_round_meets_leaves_the_least_depth() -> None:
    assert limits(itl_budget_ms=1)[0].k_max == 0
    assert limits(itl_budget_ms=1, k_min=2)[0].k_max == 2


def test_without_a_profile_a_budget_holds_from_measured_rounds_on() -> None:
    found, reasons = limits(None, itl_budget_ms=50)
    assert (found.k_max, found.round_budget_s) == (32, 0.05)
    assert "as they are measured" in reasons["k_max"]


@pytest.mark.parametrize(("named", "advised_k"), [({"link_bytes_per_s": 12e9}, 8), ({"link_bytes_per_s": 25e9}, None)])
def test_a_link_at_pcie_3_rates_advises_eight(named: dict[str, Any], advised_k: int | None) -> None:
    found, reasons = limits(**named)
    assert found.advised_k == advised_k
    assert ("12.0 GB/s" in reasons.get("k", "")) == (advised_k is not None)


def test_the_measured_link_counts_as_much_as_the_paced_one() -> None:
    assert limits(replace(PROFILE, pinned_copy={1 << 23: 11e9}))[0].advised_k == 8
    assert limits(replace(PROFILE, pinned_copy={1 << 23: 11e9}), rows=17, k_min=12)[0].advised_k == 12


def test_limits_reach_the_governor() -> None:
    options = LoadOptions(device="cuda", k_min=2)
    governor = governor_for(options, DepthLimits(2, 5))
    assert isinstance(governor, AmortizingDepth)
    assert governor.choose(32) == 2
    assert isinstance(governor_for(LoadOptions(device="cuda", k=7), DepthLimits(0, 32)), FixedDepth)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"k_min": -1}, "k_min must be a whole number from 0 to 32, got -1"),
        ({"k_min": 40}, "k_min=40 needs 41 rows, but rows is 33; load with rows=65"),
        ({"k_min": 17, "device": "cpu"}, "k_min=17 needs 18 rows, but rows is 17"),
        ({"itl_budget_ms": 0}, "itl_budget_ms must be above 0 ms, got 0"),
    ],
)
def test_limits_that_mean_nothing_are_refused(named: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        LoadOptions(**{"device": "cuda", **named})
