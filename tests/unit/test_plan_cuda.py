"""Memory of a GPU and of the host before it: who gets what, and what is refused with the missing amount."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moespeq.config import LoadOptions
from moespeq.errors import BudgetError, UsageError
from moespeq.plan import (
    Machine,
    MemoryNeeds,
    MemoryPlan,
    cuda_scratch_bytes,
    least_memory_bytes,
    plan_memory,
    resolve_options,
)
from moespeq.types import ModelShape

MIB, GIB = 2**20, 2**30
QWEN = ModelShape(
    model_type="qwen2_moe",
    num_layers=24,
    num_moe_layers=24,
    num_experts=60,
    top_k=4,
    hidden_size=2048,
    vocab_size=4096,
    max_context_tok=8192,
    matrices=(("up", 2816, 2048), ("down", 2048, 1408)),
    kv_bytes_per_tok=24 * 2 * 16 * 128 * 2,
)
SLOT_BYTES = 9_302_016  # 8.6 bits a weight
NEEDS = MemoryNeeds(
    shape=QWEN,
    dense_bytes=2_500_000_000,
    base_bytes=7_000_000_000,
    slot_bytes=SLOT_BYTES,
    num_records=1440,
    records_bytes=1440 * SLOT_BYTES,
)
H200 = Machine(host_free_bytes=120 * GIB, num_cores=16, gpu_free_bytes=138 * GIB, gpu="NVIDIA H200")


def planned(machine: Machine = H200, needs: MemoryNeeds = NEEDS, **options: Any) -> MemoryPlan:
    return plan_memory(needs, resolve_options(LoadOptions(**options), machine), machine)


def test_a_gpu_is_taken_where_there_is_one_and_the_cpu_says_why_not() -> None:
    why = "torch 2.13.0+cpu is built without CUDA; install a CUDA build of torch, or use --device cpu."
    without = Machine(host_free_bytes=120 * GIB, gpu=why)
    assert resolve_options(LoadOptions(), H200).device == "cuda"
    assert resolve_options(LoadOptions(device="cpu"), H200).device == "cpu"
    assert resolve_options(LoadOptions(), without).device == "cpu"
    assert planned(without).reasons["device"] == f"cpu: {why}"
    with pytest.raises(UsageError) as caught:
        resolve_options(LoadOptions(device="cuda"), without)
    assert str(caught.value) == why


def test_rows_follow_the_device_and_a_k_too_long_for_it_is_refused_then() -> None:
    without = replace(H200, gpu_free_bytes=None)
    assert resolve_options(LoadOptions(k=32), H200).row_bucket == 33
    assert resolve_options(LoadOptions(k=16), without).row_bucket == 17
    with pytest.raises(UsageError, match=r"k=32 needs 33 rows, but rows is 17; load with rows=33 \(--rows 33\)\."):
        resolve_options(LoadOptions(k=32), without)
    assert resolve_options(LoadOptions(k=32, rows=33), without).row_bucket == 33
    assert planned().reasons["rows"] == "33: most tokens of a verify pass, a draft and one more; the default on a GPU"
    assert planned(mode="on_demand").reasons["rows"] == "1: on demand a pass takes one token"


def test_qwen_in_12_gib_has_more_than_200_slots() -> None:
    plan = planned(device_memory=12 * GIB, ctx_size=1024)
    assert 200 < plan.num_slots < 290
    assert plan.total_bytes <= plan.budget_bytes == 12 * GIB
    assert plan.host_bytes == NEEDS.records_bytes
    assert plan.device == "cuda"
    assert plan.threads == 1


def test_every_use_of_the_workspace_is_a_figure_with_a_reason_and_they_add_up() -> None:
    plan = planned(device_memory=12 * GIB)
    figures = {figure.name: figure.num_bytes for figure in plan.workspace}
    assert set(figures) == {"activations", "intermediates", "mask", "logits", "scratch", "graphs", "pools", "context"}
    assert all(figure.num_bytes > 0 and figure.reason for figure in plan.workspace)
    assert plan.workspace_bytes == sum(figures.values())
    assert figures["context"] == 880 * MIB
    parts = (plan.dense_bytes, plan.base_bytes, plan.kv_bytes, plan.workspace_bytes, plan.slots_bytes)
    assert plan.total_bytes == sum(parts)


def test_a_gpu_decodes_into_64_mib_or_room_for_two_experts() -> None:
    large = replace(QWEN, matrices=(("up", 28672, 4096), ("down", 4096, 14336)))
    for shape, wanted_bytes in ((QWEN, 64 * MIB), (large, 2 * 2 * large.weights_per_expert)):
        figures = {
            figure.name: figure for figure in planned(needs=replace(NEEDS, shape=shape), ctx_size=1024).workspace
        }
        assert figures["scratch"].num_bytes == wanted_bytes == cuda_scratch_bytes(2 * shape.weights_per_expert)
        assert figures["intermediates"].num_bytes == 2 * 1024 * 4 * shape.matrices[-1][2]


def test_the_driver_and_the_graphs_cost_nothing_on_a_cpu() -> None:
    names = {figure.name for figure in planned(device="cpu").workspace}
    assert names == {"activations", "mask", "logits", "scratch"}


def test_without_a_budget_a_part_of_the_free_gpu_memory_is_left_unless_all_fits() -> None:
    assert planned().num_slots == 1440
    assert "every expert fits" in planned().reasons["device_memory"]
    tight = planned(replace(H200, gpu_free_bytes=16 * GIB))
    assert tight.budget_bytes == int(0.95 * 16 * GIB)
    assert tight.reasons["device_memory"] == "15.20 GiB: 95% of the 16.00 GiB free"


def test_on_demand_gives_the_bank_to_slots() -> None:
    speculative, on_demand = (planned(device_memory=12 * GIB, mode=mode) for mode in ("speculative", "on_demand"))
    assert on_demand.base_bytes == 0
    assert on_demand.num_slots > speculative.num_slots + 7_000_000_000 // SLOT_BYTES


def test_more_than_the_gpu_has_free_is_refused_with_the_missing_amount() -> None:
    plan = planned(device_memory=12 * GIB)
    free_bytes = plan.total_bytes - 880 * MIB  # the context of this process is not free any more
    assert planned(replace(H200, gpu_free_bytes=free_bytes), device_memory=12 * GIB).num_slots == plan.num_slots
    with pytest.raises(BudgetError, match=r"of the GPU's memory are free, 1 B too little; lower --device-memory"):
        planned(replace(H200, gpu_free_bytes=free_bytes - 1), device_memory=12 * GIB)


def test_a_budget_without_room_for_a_slot_names_what_must_fit() -> None:
    least_bytes = least_memory_bytes(NEEDS, LoadOptions(device="cuda"))
    assert planned(device_memory=least_bytes).num_slots == 1
    with pytest.raises(BudgetError, match=r"is 1 B too small: dense weights .* INT4 base .* must fit"):
        planned(device_memory=least_bytes - 1)


def test_all_records_are_pinned_where_the_host_holds_them_else_a_cache_of_what_fits() -> None:
    assert planned().reasons["host_memory"] == "12.47 GiB: every record fits, pinned"
    small = planned(replace(H200, host_free_bytes=8 * GIB))
    assert small.host_bytes == int(0.85 * 8 * GIB)
    assert "85% of the 8.00 GiB free, a cache of records that take 12.47 GiB" in small.reasons["host_memory"]


def test_host_memory_asked_for_is_taken_up_to_all_records_and_at_least_a_few() -> None:
    assert planned(host_memory=2 * GIB).host_bytes == 2 * GIB
    assert planned(host_memory=100 * GIB).host_bytes == NEEDS.records_bytes
    least = planned(host_memory=0)
    assert least.host_bytes == 8 * SLOT_BYTES
    assert "8 records" in least.reasons["host_memory"]


def test_host_memory_that_is_not_free_is_refused() -> None:
    crowded = replace(H200, host_free_bytes=GIB)
    with pytest.raises(BudgetError, match=r"host arena of 2\.00 GiB is larger than the 1\.00 GiB of host memory"):
        planned(crowded, host_memory=2 * GIB)
    with pytest.raises(BudgetError, match=r"hold less than 8 expert records, 70\.97 MiB; free some memory"):
        planned(replace(H200, host_free_bytes=64 * MIB))


def test_every_automatic_figure_has_a_reason() -> None:
    automatic = {"ctx_size", "device", "device_memory", "host_memory", "link_depth", "num_slots", "rows", "threads"}
    assert set(planned().reasons) == automatic | {"base"}
    given = planned(ctx_size=100, device_memory=12 * GIB, host_memory=20 * GIB, threads=2, rows=17)
    assert set(given.reasons) == {"base", "device", "link_depth", "num_slots"}
