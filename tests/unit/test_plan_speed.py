"""What a plan says of speed, and of what sharing weights saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moespeq.config import LoadOptions
from moespeq.plan import Machine, MemoryNeeds, MemoryPlan, plan_memory
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes
from moespeq.plan.sharing import sharing_of
from moespeq.plan.speed import Speed, expected_speed
from moespeq.types import ModelShape

GIB, MB = 1 << 30, 10**6
GPU = "NVIDIA H200"
SHAPE = ModelShape("qwen2_moe", 24, 24, 60, 4, 2048, 1000, 4096, (("up", 1408, 2048), ("down", 2048, 704)), 100_000)
NEEDS = MemoryNeeds(SHAPE, 2 * GIB, 3 * GIB, 5 * MB, 24 * 60, 24 * 60 * 5 * MB, "qwen")
TIMES = ModelTimes("qwen", 1e-3, {17: 0.01, 33: 0.02}, 2e12)
PROFILE = MachineProfile(GPU, {1 << 22: 50e9}, {1 << 22: 5e9}, (DiskRate(1, 2e9, True),), (TIMES,))


def planned(
    profile: MachineProfile | None = PROFILE, *, agreement: float = 0.95, needs: MemoryNeeds = NEEDS, **named: Any
) -> tuple[MemoryPlan, Speed | None]:
    machine = Machine(64 * GIB, gpu_free_bytes=80 * GIB, gpu=GPU, profile=profile, profile_path=Path("/p.json"))
    options = LoadOptions.from_mapping({"device": "cuda", "records": "store", "device_memory": 9 * GIB, **named})
    plan = plan_memory(needs, options, machine)
    return plan, expected_speed(plan, needs, options, machine, agreement=agreement)


def speed_of(*args: Any, **named: Any) -> Speed:
    speed = planned(*args, **named)[1]
    assert speed is not None
    return speed


def test_a_fixed_k_takes_its_round_by_the_profile() -> None:
    plan, speed = planned(k=0)
    assert speed is not None
    missing = 1 - plan.num_slots / NEEDS.num_records
    link_s = missing * 24 * 4 * NEEDS.slot_bytes / 50e9
    assert speed.tokens_per_s == pytest.approx(1 / (0.01 + link_s))
    assert (speed.k, speed.committed_per_round, speed.is_link_alone) == (0, 1.0, False)
    assert speed.hit_share == pytest.approx(1 - missing)


def test_the_best_depth_is_chosen_and_a_draft_that_never_agrees_is_not_worth_one() -> None:
    assert speed_of(agreement=0.97).k > 4
    assert speed_of(agreement=0.97).tokens_per_s > speed_of(k=0).tokens_per_s
    assert speed_of(agreement=0.0).k == 0


@pytest.mark.parametrize("bound", [{"k": 6}, {"k_min": 6, "agreement": 0.0}])
def test_what_was_asked_of_k_is_kept(bound: dict[str, Any]) -> None:
    assert speed_of(**bound).k == 6


def test_without_times_of_the_model_the_link_alone_bounds_it_from_above() -> None:
    unmeasured = replace(PROFILE, models=())
    speed = speed_of(unmeasured, k=0)
    assert speed.is_link_alone
    assert speed.tokens_per_s > speed_of(k=0).tokens_per_s


def test_a_bandwidth_that_is_given_is_enough_and_no_bandwidth_is_no_speed() -> None:
    assert speed_of(None, link_bytes_per_s=25e9).s_per_byte == pytest.approx(1 / 25e9)
    assert planned(None)[1] is None


def test_nothing_is_said_of_what_was_not_measured() -> None:
    everything = planned(replace(PROFILE, models=()), device_memory=40 * GIB)
    assert everything[0].num_slots == NEEDS.num_records
    assert everything[1] is None, "all resident and no times"
    assert planned(records="mixed", base_memory=GIB)[1] is None, "a draft with a part of its base"


def test_records_that_host_memory_does_not_hold_come_from_the_disk() -> None:
    half = NEEDS.records_bytes // 2
    assert speed_of(host_memory=half, k=0).s_per_byte == pytest.approx(1 / 50e9 + 0.5 / 2e9)


def test_sharing_saves_a_second_model_and_what_bf16_takes_more_than_residuals() -> None:
    plan, _ = planned()
    sharing = sharing_of(plan, NEEDS)
    assert sharing is not None
    more = 2 * SHAPE.weights_per_expert - NEEDS.slot_bytes
    assert sharing.slots_bytes == plan.num_slots * more
    assert sharing.host_bytes == NEEDS.num_records * more
    assert sharing.saved_bytes == plan.dense_bytes + plan.kv_bytes + sharing.slots_bytes + sharing.host_bytes
    assert sharing.saved_share == pytest.approx(
        sharing.saved_bytes / (plan.total_bytes + plan.host_bytes + sharing.saved_bytes)
    )


def test_nothing_is_shared_where_nothing_is_drafted() -> None:
    assert sharing_of(planned(records="whole", k=0)[0], NEEDS) is None
