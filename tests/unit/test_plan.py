"""Every byte of the device has a purpose before anything is loaded; what does not fit is refused with the amount."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from moespeq.config import LoadOptions, format_at_least, format_bytes
from moespeq.errors import BudgetError, UsageError
from moespeq.plan import Machine, MemoryNeeds, MemoryPlan, least_memory_bytes, plan_memory
from moespeq.types import ModelShape

MIB, GIB = 2**20, 2**30
SHAPE = ModelShape(
    model_type="mixtral",
    num_layers=4,
    num_moe_layers=4,
    num_experts=8,
    top_k=2,
    hidden_size=64,
    vocab_size=320,
    max_context_tok=8192,
    matrices=(("up", 96, 64), ("down", 64, 48)),
    kv_bytes_per_tok=1000,
)
NEEDS = MemoryNeeds(
    shape=SHAPE, dense_bytes=3 * MIB, base_bytes=2 * MIB, slot_bytes=MIB, num_records=32, records_bytes=32 * MIB
)


def planned(*, available_bytes: int = 64 * GIB, needs: MemoryNeeds = NEEDS, **options: Any) -> MemoryPlan:
    return plan_memory(needs, LoadOptions(**{"device": "cpu", **options}), Machine(available_bytes))


def fixed_bytes(plan: MemoryPlan) -> int:
    """All but the slots."""
    return plan.total_bytes - plan.slots_bytes


def test_every_expert_has_a_slot_where_memory_allows() -> None:
    plan = planned()
    assert plan.num_slots == NEEDS.num_records
    assert plan.budget_bytes == plan.total_bytes
    assert "every expert fits" in plan.reasons["device_memory"]


def test_a_part_of_the_base_is_all_of_it_where_memory_allows() -> None:
    plan = planned(records="mixed")
    assert (plan.num_bases, plan.num_slots) == (NEEDS.num_records, NEEDS.num_records)


def test_purposes_add_up_to_the_total() -> None:
    plan = planned(device_memory=64 * MIB)
    parts = (plan.dense_bytes, plan.base_bytes, plan.kv_bytes, plan.workspace_bytes, plan.num_slots * MIB)
    assert plan.total_bytes == sum(parts)
    assert min(parts) > 0


@pytest.mark.parametrize("num_slots", [1, 7, 31])
def test_a_budget_is_used_to_the_last_whole_slot_and_never_exceeded(num_slots: int) -> None:
    budget_bytes = fixed_bytes(planned()) + num_slots * MIB
    for extra_bytes, expected in ((0, num_slots), (MIB - 1, num_slots), (-1, num_slots - 1)):
        if not expected:
            continue
        plan = planned(device_memory=budget_bytes + extra_bytes)
        assert plan.num_slots == expected
        assert plan.total_bytes <= plan.budget_bytes == budget_bytes + extra_bytes


def test_a_budget_above_all_experts_takes_no_more_than_they_need() -> None:
    assert planned(device_memory=GIB).num_slots == NEEDS.num_records


def test_one_byte_short_of_one_slot_is_refused_with_the_missing_byte() -> None:
    least_bytes = fixed_bytes(planned()) + MIB
    with pytest.raises(
        BudgetError, match=r"is 1 B too small: .* give at least " + re.escape(format_at_least(least_bytes))
    ):
        planned(device_memory=least_bytes - 1)


def test_a_refusal_names_every_purpose_and_what_is_missing() -> None:
    plan = planned()
    with pytest.raises(BudgetError) as caught:
        planned(device_memory=4 * MIB)
    missing_bytes = fixed_bytes(plan) + MIB - 4 * MIB
    for purpose in (
        "budget of 4.00 MiB",
        f"{format_bytes(missing_bytes)} too small",
        "dense weights 3.00 MiB",
        "INT4 base 2.00 MiB",
        f"KV cache {format_bytes(plan.kv_bytes)}",
        f"workspace {format_bytes(plan.workspace_bytes)}",
        "one expert 1.00 MiB",
    ):
        assert purpose in str(caught.value)


def test_memory_asked_for_but_not_free_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"only 10\.00 MiB of host memory are free"):
        planned(device_memory=64 * MIB, available_bytes=10 * MIB)


def test_a_host_cache_is_part_of_what_must_be_free() -> None:
    free_bytes = planned().total_bytes + MIB
    assert planned(device_memory=GIB, host_memory=MIB, available_bytes=free_bytes).host_bytes == MIB
    with pytest.raises(BudgetError, match="1 B too little"):
        planned(device_memory=GIB, host_memory=MIB + 1, available_bytes=free_bytes)


def test_without_a_budget_a_part_of_free_memory_is_left_to_the_system() -> None:
    free_bytes = int((fixed_bytes(planned()) + 10 * MIB) / 0.8)
    plan = planned(available_bytes=free_bytes)
    assert plan.num_slots in (9, 10)
    assert plan.total_bytes <= 0.8 * free_bytes
    assert "80%" in plan.reasons["device_memory"]


def test_an_automatic_budget_leaves_room_for_the_host_cache() -> None:
    free_bytes = int((fixed_bytes(planned()) + 20 * MIB) / 0.8)
    plan = planned(available_bytes=free_bytes, host_memory=10 * MIB)
    assert plan.total_bytes <= 0.8 * (free_bytes - 10 * MIB)
    assert plan.num_slots < planned(available_bytes=free_bytes).num_slots


def test_too_little_free_memory_is_refused_even_without_a_budget() -> None:
    with pytest.raises(BudgetError, match=r"too small: .* give at least"):
        planned(available_bytes=MIB)


@pytest.mark.parametrize("options", [{}, {"device_memory": 64 * MIB}])
def test_a_host_cache_larger_than_what_is_free_is_named_as_the_fault(options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match=r"host cache of 65\.00 GiB is larger than the 64\.00 GiB .* that are free"):
        planned(host_memory=65 * GIB, **options)


def test_more_threads_than_the_cores_have_a_use_for_are_refused() -> None:
    machine = Machine(64 * GIB, num_cores=4)
    assert plan_memory(NEEDS, LoadOptions(device="cpu", threads=32), machine).threads == 32
    with pytest.raises(UsageError, match="threads must be at most 32 on 4 physical cores, got 33"):
        plan_memory(NEEDS, LoadOptions(device="cpu", threads=33), machine)


@pytest.mark.parametrize(("asked", "got"), [(None, 4096), (8192, 8192), (100, 100)])
def test_the_context_is_the_models_up_to_a_default_unless_asked_for(asked: int | None, got: int) -> None:
    plan = planned(ctx_size=asked)
    assert plan.context_tok == got
    assert ("ctx_size" in plan.reasons) == (asked is None)


def test_a_short_model_bounds_the_context() -> None:
    assert planned(needs=replace(NEEDS, shape=replace(SHAPE, max_context_tok=512))).context_tok == 512


def test_a_context_longer_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ctx_size 8193 is longer than the 8192 tokens .* use at most 8192"):
        planned(ctx_size=8193)


@pytest.mark.parametrize("rows", [17, 33, 65])
def test_the_cache_holds_its_longest_bucket_or_the_context_and_one_row_bucket(rows: int) -> None:
    assert planned(rows=rows, ctx_size=100).kv_bytes == 256 * 1000
    assert planned(rows=rows, ctx_size=256).kv_bytes == (256 + rows) * 1000


def test_on_demand_gives_the_bases_room_to_slots() -> None:
    budget_bytes = fixed_bytes(planned()) + 5 * MIB
    plan = planned(device_memory=budget_bytes, mode="on_demand")
    assert plan.base_bytes == 0
    assert plan.num_slots >= 5 + NEEDS.base_bytes // MIB


def test_a_bank_of_some_experts_gets_most_of_what_it_shares_with_the_slots() -> None:
    needs = replace(NEEDS, base_bytes=16 * MIB)
    room_bytes = 10 * MIB
    budget_bytes = planned(needs=needs, records="whole").total_bytes - needs.num_records * MIB + room_bytes
    plan = planned(needs=needs, records="mixed", device_memory=budget_bytes)
    assert (plan.num_bases, plan.base_bytes) == (17, 17 * MIB // 2)  # of half a MiB: 85 % of 10 MiB
    assert plan.num_slots == 1
    assert plan.total_bytes <= budget_bytes
    assert "8.50 MiB, 85% of what slots and base share: the base of the 17 of 32 experts" in plan.reasons["base"]


def test_a_bank_of_some_experts_leaves_a_slot_and_has_a_row() -> None:
    needs = replace(NEEDS, base_bytes=16 * MIB)
    least_bytes = least_memory_bytes(needs, LoadOptions(device="cpu", records="mixed"))
    for more_bytes, num_bases in ((0, 1), (MIB // 2, 2), (MIB, 3), (2 * MIB, 5)):
        plan = planned(needs=needs, records="mixed", device_memory=least_bytes + more_bytes)
        assert (plan.num_bases, plan.num_slots) == (num_bases, 1)


@pytest.mark.parametrize(("asked_bytes", "num_bases"), [(MIB // 2, 1), (3 * MIB + 5, 6), (100 * MIB, 32)])
def test_base_memory_is_taken_to_the_last_whole_row_and_the_rest_is_slots(asked_bytes: int, num_bases: int) -> None:
    needs = replace(NEEDS, base_bytes=16 * MIB)
    plan = planned(needs=needs, records="mixed", base_memory=asked_bytes, device_memory=70 * MIB)
    assert (plan.num_bases, plan.base_bytes) == (num_bases, num_bases * MIB // 2)
    assert plan.num_slots == min(32, (70 * MIB - fixed_bytes(plan)) // MIB)
    with pytest.raises(BudgetError, match=f"INT4 base {format_bytes(plan.base_bytes)}"):
        planned(needs=needs, records="mixed", base_memory=asked_bytes, device_memory=fixed_bytes(plan))


@pytest.mark.parametrize(
    ("options", "num_bases", "words"),
    [
        ({}, 32, "2.00 MiB: the base of all 32 experts is resident"),
        ({"records": "whole"}, 0, "0 B: the INT4 base, 2.00 MiB, travels with its residual and nothing is drafted"),
        ({"mode": "on_demand"}, 0, None),
    ],
)
def test_the_plan_says_how_much_of_the_base_is_resident(
    options: dict[str, Any], num_bases: int, words: str | None
) -> None:
    plan = planned(**options)
    assert plan.num_bases == num_bases
    assert (words or "") in plan.reasons.get("base", "")
    assert ("base" in plan.reasons) == (words is not None)


def test_workspace_grows_with_prefill_rows_only_up_to_the_context() -> None:
    small, whole, more = (planned(ctx_size=1000, prefill_rows=rows) for rows in (10, 1000, 10_000))
    assert small.workspace_bytes < whole.workspace_bytes == more.workspace_bytes


def test_products_too_small_to_share_run_on_one_thread_unless_asked_otherwise() -> None:
    large = replace(SHAPE, matrices=(("up", 4096, 1024), ("down", 1024, 2048)))
    for shape, threads in ((SHAPE, 1), (large, 8)):
        needs = replace(NEEDS, shape=shape)
        assert plan_memory(needs, LoadOptions(device="cpu"), Machine(64 * GIB, num_cores=8)).threads == threads
    assert planned(threads=3).threads == 3


def test_every_automatic_figure_has_a_reason() -> None:
    automatic = {"ctx_size", "device", "device_memory", "host_memory", "link_depth", "num_slots", "rows", "threads"}
    assert set(planned().reasons) == automatic | {"base"}
    given = planned(ctx_size=100, device_memory=GIB, host_memory=0, threads=2, rows=17)
    assert set(given.reasons) == {"base", "device", "link_depth", "num_slots"}
    assert all(figure.reason for figure in planned().workspace)


@pytest.mark.parametrize("options", [{}, {"ctx_size": 100}, {"mode": "on_demand"}, {"rows": 65}])
def test_the_least_memory_is_taken_and_one_byte_less_is_refused(options: dict[str, Any]) -> None:
    least_bytes = least_memory_bytes(NEEDS, LoadOptions(device="cpu", **options))
    assert planned(device_memory=least_bytes, **options).num_slots == 1
    with pytest.raises(BudgetError, match="1 B too small"):
        planned(device_memory=least_bytes - 1, **options)
