"""Who gets how much of the device's memory, decided before anything is loaded.

    device = dense weights + base bank + KV cache + workspace + slots

Everything but the slots must fit; slots take what is left, up to one for each record. A budget that cannot hold the
first four and one slot is refused with the amount that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moespeq.buckets import LengthBuckets
from moespeq.config import LoadOptions, format_bytes
from moespeq.errors import BudgetError, UsageError
from moespeq.plan.threads import plan_threads
from moespeq.types import ModelShape

__all__ = ["MemoryNeeds", "MemoryPlan", "least_memory_bytes", "plan_memory"]

_DEFAULT_CONTEXT_TOK = 4096
_AUTO_SHARE = 0.8  # of the free host memory, when no budget was given; the rest is the operating system's
_ACTIVATION_COPIES = 8  # [T, H] tensors alive at once in a decoder layer's forward
_LOGIT_COPIES = 2  # float32 [R, V] alive at once while a round is accepted
_SCRATCH_COPIES = 4  # bf16 copies of one expert while its record is decoded
_DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Sizes that follow from a store. slot_bytes: room of one slot; num_records: all routed experts."""

    shape: ModelShape
    dense_bytes: int
    base_bytes: int
    slot_bytes: int
    num_records: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte by purpose, and why each "auto" became what it is."""

    budget_bytes: int
    dense_bytes: int
    base_bytes: int
    kv_bytes: int
    workspace_bytes: int
    slot_bytes: int
    num_slots: int
    host_bytes: int
    context_tok: int
    threads: int
    reasons: Mapping[str, str]

    @property
    def slots_bytes(self) -> int:
        """All slots together."""
        return self.num_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Device memory the engine takes."""
        return self.dense_bytes + self.base_bytes + self.kv_bytes + self.workspace_bytes + self.slots_bytes


def least_memory_bytes(needs: MemoryNeeds, options: LoadOptions) -> int:
    """The smallest device budget that `plan_memory` takes with these options: everything fixed, and one slot."""
    context_tok = _resolve_context(needs.shape, options, {})
    return sum(_fixed_bytes(needs, options, context_tok)) + needs.slot_bytes


def plan_memory(needs: MemoryNeeds, options: LoadOptions, *, available_bytes: int, num_cores: int = 1) -> MemoryPlan:
    """Resolve context, budget and slots. Raises BudgetError with the amount missing, or UsageError."""
    reasons: dict[str, str] = {}
    context_tok = _resolve_context(needs.shape, options, reasons)
    dense_bytes, base_bytes, kv_bytes, workspace_bytes = _fixed_bytes(needs, options, context_tok)
    fixed_bytes = dense_bytes + base_bytes + kv_bytes + workspace_bytes
    host_bytes = options.host_memory if options.host_memory is not None else 0
    if options.host_memory is None:
        reasons["host_memory"] = "0 B: the device is host memory, a second copy there would gain nothing"
    if host_bytes >= available_bytes:
        raise BudgetError(
            f"The host cache of {format_bytes(host_bytes)} is larger than the {format_bytes(available_bytes)} of host "
            f"memory that are free; lower --host-memory."
        )
    budget_bytes = _resolve_budget(options, fixed_bytes, needs, available_bytes - host_bytes, reasons)
    num_slots = min(needs.num_records, (budget_bytes - fixed_bytes) // needs.slot_bytes)
    if num_slots < 1:
        raise BudgetError(_missing(fixed_bytes, base_bytes, kv_bytes, workspace_bytes, needs, budget_bytes))
    reasons["num_slots"] = f"{num_slots} of {needs.num_records} experts fit into what the rest leaves of the budget"
    plan = MemoryPlan(
        budget_bytes=budget_bytes,
        dense_bytes=dense_bytes,
        base_bytes=base_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=workspace_bytes,
        slot_bytes=needs.slot_bytes,
        num_slots=num_slots,
        host_bytes=host_bytes,
        context_tok=context_tok,
        threads=plan_threads(needs.shape, options.threads, num_cores, reasons),
        reasons=reasons,
    )
    _check_available(plan, available_bytes)
    return plan


def _fixed_bytes(needs: MemoryNeeds, options: LoadOptions, context_tok: int) -> tuple[int, int, int, int]:
    """Dense weights, base bank, KV cache and workspace: what does not depend on the budget."""
    base_bytes = 0 if options.mode == "on_demand" else needs.base_bytes
    kv_tok = LengthBuckets(context_tok).storage_tok(context_tok, options.row_bucket)
    kv_bytes = kv_tok * needs.shape.kv_bytes_per_tok
    return needs.dense_bytes, base_bytes, kv_bytes, _workspace_bytes(needs.shape, options, context_tok)


def _resolve_context(shape: ModelShape, options: LoadOptions, reasons: dict[str, str]) -> int:
    if options.ctx_size is None:
        context_tok = min(shape.max_context_tok, _DEFAULT_CONTEXT_TOK)
        reasons["ctx_size"] = (
            f"{context_tok}: the model's {shape.max_context_tok}, at most {_DEFAULT_CONTEXT_TOK} unless asked for"
        )
        return context_tok
    if options.ctx_size > shape.max_context_tok:
        raise UsageError(
            f"ctx_size {options.ctx_size} is longer than the {shape.max_context_tok} tokens the model was made for; "
            f"use at most {shape.max_context_tok}."
        )
    return options.ctx_size


def _resolve_budget(
    options: LoadOptions, fixed_bytes: int, needs: MemoryNeeds, available_bytes: int, reasons: dict[str, str]
) -> int:
    if options.device_memory is not None:
        return options.device_memory
    all_bytes = fixed_bytes + needs.num_records * needs.slot_bytes
    share_bytes = int(_AUTO_SHARE * available_bytes)
    if all_bytes <= share_bytes:
        reasons["device_memory"] = f"{format_bytes(all_bytes)}: every expert fits"
        return all_bytes
    reasons["device_memory"] = (
        f"{format_bytes(share_bytes)}: {_AUTO_SHARE:.0%} of the {format_bytes(available_bytes)} free"
    )
    return share_bytes


def _workspace_bytes(shape: ModelShape, options: LoadOptions, context_tok: int) -> int:
    """Activations and mask of the longest prefill chunk, logits and noise of a verify pass, scratch of one expert."""
    rows = max(min(options.prefill_rows, context_tok), options.row_bucket)
    activations = rows * shape.hidden_size * _DTYPE_BYTES * (_ACTIVATION_COPIES + shape.top_k)
    mask = rows * context_tok * _DTYPE_BYTES
    logits = options.row_bucket * shape.vocab_size * 4 * _LOGIT_COPIES
    scratch = shape.weights_per_expert * _DTYPE_BYTES * _SCRATCH_COPIES
    return activations + mask + logits + scratch


def _missing(fixed: int, base: int, kv: int, workspace: int, needs: MemoryNeeds, budget_bytes: int) -> str:
    least_bytes = fixed + needs.slot_bytes
    return (
        f"The memory budget of {format_bytes(budget_bytes)} is {format_bytes(least_bytes - budget_bytes)} too small: "
        f"dense weights {format_bytes(needs.dense_bytes)}, INT4 base {format_bytes(base)}, "
        f"KV cache {format_bytes(kv)}, workspace {format_bytes(workspace)} and one expert "
        f"{format_bytes(needs.slot_bytes)} must fit; "
        f"give at least {format_bytes(least_bytes)}, or a shorter --ctx-size."
    )


def _check_available(plan: MemoryPlan, available_bytes: int) -> None:
    wanted_bytes = plan.total_bytes + plan.host_bytes
    if wanted_bytes > available_bytes:
        raise BudgetError(
            f"The engine would take {format_bytes(wanted_bytes)} and only {format_bytes(available_bytes)} of host "
            f"memory are free, {format_bytes(wanted_bytes - available_bytes)} too little; "
            f"lower --device-memory or --host-memory."
        )
