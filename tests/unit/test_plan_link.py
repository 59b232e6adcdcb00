"""The depth of the link's queue follows what was measured of this machine and this model, and says from which file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moespeq.config import LoadOptions
from moespeq.plan import Machine, resolve_options
from moespeq.plan.link import plan_link_depth
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes

MB = 10**6
GPU = "NVIDIA H200"
FILE = Path("/cache/profile.json")
PROFILE = MachineProfile(
    GPU,
    {1 << 20: 20e9, 1 << 23: 50e9},
    {1 << 20: 5e9},
    (DiskRate(1, 1e9, True), DiskRate(4, 2e9, True)),
    (ModelTimes("qwen", 0.001, {33: 0.01}, 2e12),),
)


def depth(
    profile: MachineProfile | None,
    *,
    model: str = "qwen",
    num_slots: int = 1000,
    slot_bytes: int = 10 * MB,
    **named: Any,
) -> tuple[int, dict[str, str]]:
    machine = Machine(1 << 40, gpu_free_bytes=1 << 40, gpu=GPU, profile=profile, profile_path=FILE)
    reasons: dict[str, str] = {}
    options = resolve_options(LoadOptions(**named), machine)
    found = plan_link_depth(options, machine, reasons, model=model, slot_bytes=slot_bytes, num_slots=num_slots)
    assert reasons["link_depth"].startswith(f"{found}: ")
    return found, reasons


def test_without_a_profile_a_fast_link_is_reckoned_with() -> None:
    found, reasons = depth(None)
    assert found == 14 + 2, "55 GB/s move 13.75 records in 2.5 ms"
    assert reasons["link_depth"].endswith(
        "2 more can begin; guessed, nothing was measured here (`moespeq profile` does)"
    )
    assert set(reasons) == {"link_depth"}


def test_the_measured_link_at_the_records_size_and_the_measured_draft_take_the_place_of_both_guesses() -> None:
    found, reasons = depth(PROFILE)
    assert found == 5 + 2, "50 GB/s move 5 records in 1 ms"
    assert "at 50.0 GB/s a draft step of 1.00 ms moves 5 records" in reasons["link_depth"]
    assert reasons["link_depth"].endswith(f"measured, in {FILE}")
    assert depth(PROFILE, slot_bytes=MB)[0] == 20 + 2, "small blocks are slower"


def test_a_model_that_was_not_measured_keeps_the_guess_for_its_draft_alone() -> None:
    found, reasons = depth(PROFILE, model="phi")
    assert found == 13 + 2, "50 GB/s move 12.5 records in 2.5 ms"
    assert f"{FILE} has no times of phi (`moespeq profile MODEL` adds them)" in reasons["link_depth"]


def test_a_profile_of_another_device_is_not_used_and_the_reason_names_both() -> None:
    other = replace(PROFILE, device="NVIDIA A100")
    found, reasons = depth(other)
    assert found == depth(None)[0]
    assert reasons["profile"] == f"{FILE} was measured on NVIDIA A100, not on {GPU}: not used"
    assert "was measured on NVIDIA H200, not on cpu" in depth(PROFILE, device="cpu")[1]["profile"]


@pytest.mark.parametrize(("num_slots", "expected"), [(1000, 7), (40, 4), (5, 1), (1, 1)])
def test_the_queue_takes_at_most_a_tenth_of_the_slots(num_slots: int, expected: int) -> None:
    found, reasons = depth(PROFILE, num_slots=num_slots)
    assert found == expected
    bound = {7: "2 more can begin; m", 4: "no more than a tenth of the 40 slots", 1: "but one at least"}[expected]
    assert bound in reasons["link_depth"]


@pytest.mark.parametrize("profile", [None, replace(PROFILE, device="cpu", models=())])
def test_a_cpu_without_times_of_the_model_has_two_fetches_a_thread(profile: MachineProfile | None) -> None:
    assert depth(profile, device="cpu", link_threads=3)[0] == 6


def test_a_cpu_reckons_with_its_disk_and_never_with_less_than_two_fetches_a_thread() -> None:
    cpu = replace(PROFILE, device="cpu", pinned_copy={}, models=(ModelTimes("qwen", 0.05, {17: 0.1}, 1e9),))
    found, reasons = depth(cpu, device="cpu", link_threads=2)
    assert found == 10 + 2, "2 GB/s move 10 records in 50 ms"
    assert "at 2.0 GB/s a draft step of 50.00 ms moves 10 records" in reasons["link_depth"]
    assert depth(cpu, device="cpu", num_slots=5)[0] == 4
