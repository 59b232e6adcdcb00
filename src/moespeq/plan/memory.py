"""Who gets how much of the device's memory, decided before anything is loaded.

    device = dense weights + base bank + KV cache + workspace + slots

Everything but the slots must fit; slots take what is left, up to one for each record. Where the base of a part of the
experts is resident (records "mixed"), bank and slots share what the others leave. A budget that cannot hold the first
four and one slot is refused with the amount that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moespeq.buckets import LengthBuckets
from moespeq.config import LoadOptions, format_at_least, format_bytes
from moespeq.errors import BudgetError, UsageError
from moespeq.plan.bank import describe_bank, least_rows, plan_bank_rows
from moespeq.plan.depth import DepthLimits, plan_depth
from moespeq.plan.host import plan_host_arena, plan_host_cache
from moespeq.plan.link import plan_link_depth
from moespeq.plan.machine import Machine
from moespeq.plan.threads import plan_threads
from moespeq.plan.workspace import Figure, workspace
from moespeq.types import ModelShape

__all__ = ["DEFAULT_CONTEXT_TOK", "SHORT_CONTEXT_TOK", "MemoryNeeds", "MemoryPlan", "least_memory_bytes", "plan_memory"]

DEFAULT_CONTEXT_TOK, SHORT_CONTEXT_TOK = 4096, 256
_HOST_SHARE = 0.8  # of the free host memory, when no budget was given; the rest is the operating system's
_GPU_SHARE = 0.95  # of the free GPU memory; the rest is what others may still take


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Sizes that follow from a store. slot_bytes: room of one slot; num_records: all routed experts;
    records_bytes: an arena in host memory that holds all of their records; model: the store's name.
    is_complete: records are the checkpoint's own numbers, so that none would be larger without a base.
    """

    shape: ModelShape
    dense_bytes: int
    base_bytes: int
    slot_bytes: int
    num_records: int
    records_bytes: int
    model: str = ""
    is_complete: bool = False

    @property
    def base_row_bytes(self) -> int:
        """One expert's row of the base bank."""
        return -(-self.base_bytes // self.num_records)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte by purpose, and why each "auto" became what it is.

    num_bases: experts whose base is resident.
    host_bytes: a cache before the disk on a CPU; on CUDA the pinned arena in front of the link. prefix_bytes: of host
    memory too, at most, for keys and values of earlier prompts.
    link_depth: guesses are submitted while fewer fetches than this are under way. depth: what bounds the governor.
    """

    device: str
    budget_bytes: int
    dense_bytes: int
    base_bytes: int
    num_bases: int
    kv_bytes: int
    workspace: tuple[Figure, ...]
    slot_bytes: int
    num_slots: int
    host_bytes: int
    prefix_bytes: int
    context_tok: int
    threads: int
    link_depth: int
    depth: DepthLimits
    reasons: Mapping[str, str]

    @property
    def workspace_bytes(self) -> int:
        """All uses beside weights, cache and slots."""
        return sum(figure.num_bytes for figure in self.workspace)

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
    return _fixed(needs, options, _resolve_context(needs.shape, options, {})).num_bytes + needs.slot_bytes


def plan_memory(needs: MemoryNeeds, options: LoadOptions, machine: Machine) -> MemoryPlan:
    """Resolve context, budget, slots and host memory; the device is resolved already.

    Raises BudgetError with the amount missing, or UsageError.
    """
    reasons = {"device": f"{options.device}: {machine.gpu}"}
    if options.rows is None:
        reasons["rows"] = _default_rows(options)
    context_tok = _resolve_context(needs.shape, options, reasons)
    if options.prefix_cache and needs.shape.state_bytes:
        options = replace(options, prefix_cache=0)
        reasons["prefix_bytes"] = "0: layers with a state begin nowhere but behind the last text"
    machine = _without_prefixes(machine, options)
    fixed = _fixed(needs, options, context_tok)
    host_bytes = _host_bytes(needs, options, machine, reasons)
    budget_bytes = _resolve_budget(needs, options, fixed.num_bytes, _free_bytes(machine, options, host_bytes), reasons)
    if budget_bytes < fixed.num_bytes + needs.slot_bytes:
        raise BudgetError(
            _missing(fixed, needs, budget_bytes, _shorter_context(needs, options, budget_bytes, context_tok))
        )
    if options.records == "mixed":
        fixed = _with_bank(fixed, needs, options, budget_bytes)
    num_slots = min(needs.num_records, (budget_bytes - fixed.num_bytes) // needs.slot_bytes)
    describe_bank(needs, options, fixed.num_bases, reasons)
    reasons["num_slots"] = f"{num_slots} of {needs.num_records} experts fit into what the rest leaves of the budget"
    plan = MemoryPlan(
        device=options.device,
        budget_bytes=budget_bytes,
        dense_bytes=needs.dense_bytes,
        base_bytes=fixed.base_bytes,
        num_bases=fixed.num_bases,
        kv_bytes=fixed.kv_bytes,
        workspace=fixed.workspace,
        slot_bytes=needs.slot_bytes,
        num_slots=num_slots,
        host_bytes=host_bytes,
        prefix_bytes=options.prefix_cache,
        context_tok=context_tok,
        threads=plan_threads(needs.shape, options, machine.num_cores, reasons),
        link_depth=plan_link_depth(
            options, machine, reasons, model=needs.model, slot_bytes=needs.slot_bytes, num_slots=num_slots
        ),
        depth=plan_depth(
            options,
            machine,
            reasons,
            shape=needs.shape,
            model=needs.model,
            slot_bytes=needs.slot_bytes,
            num_slots=num_slots,
        ),
        reasons=reasons,
    )
    _check_available(plan, machine)
    return plan


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What does not depend on the budget, or is decided by now."""

    dense_bytes: int
    base_bytes: int
    num_bases: int
    kv_bytes: int
    workspace: tuple[Figure, ...]

    @property
    def workspace_bytes(self) -> int:
        return sum(figure.num_bytes for figure in self.workspace)

    @property
    def num_bytes(self) -> int:
        return self.dense_bytes + self.base_bytes + self.kv_bytes + self.workspace_bytes


def _fixed(needs: MemoryNeeds, options: LoadOptions, context_tok: int) -> _Fixed:
    kv_tok = LengthBuckets(context_tok).storage_tok(context_tok, options.row_bucket)
    num_states = options.row_bucket + 2  # behind each row of a round, before it, and the running one
    num_bases = least_rows(needs, options)
    return _Fixed(
        dense_bytes=needs.dense_bytes,
        base_bytes=needs.base_bytes if num_bases == needs.num_records else num_bases * needs.base_row_bytes,
        num_bases=num_bases,
        kv_bytes=kv_tok * needs.shape.kv_bytes_per_tok + num_states * needs.shape.state_bytes,
        workspace=workspace(needs.shape, options, context_tok),
    )


def _with_bank(fixed: _Fixed, needs: MemoryNeeds, options: LoadOptions, budget_bytes: int) -> _Fixed:
    """The bank of some experts gets its share of what the rest leaves, its least rows included."""
    room_bytes = budget_bytes - fixed.num_bytes + fixed.base_bytes
    num_bases = plan_bank_rows(needs, options, room_bytes)
    return replace(fixed, num_bases=num_bases, base_bytes=num_bases * needs.base_row_bytes)


def _without_prefixes(machine: Machine, options: LoadOptions) -> Machine:
    """What the prefix cache leaves."""
    left_bytes = machine.host_free_bytes - options.prefix_cache
    if options.prefix_cache and left_bytes <= 0:
        raise BudgetError(
            f"The prefix cache of {format_bytes(options.prefix_cache)} does not fit into the "
            f"{format_bytes(machine.host_free_bytes)} of host memory that are free; lower --prefix-cache."
        )
    return replace(machine, host_free_bytes=left_bytes)


def _host_bytes(needs: MemoryNeeds, options: LoadOptions, machine: Machine, reasons: dict[str, str]) -> int:
    if options.device == "cuda":
        return plan_host_arena(needs.records_bytes, needs.slot_bytes, options, machine, reasons)
    return plan_host_cache(options, machine, reasons)


def _free_bytes(machine: Machine, options: LoadOptions, host_bytes: int) -> int:
    """Free memory of the device."""
    if options.device == "cuda":
        assert machine.gpu_free_bytes is not None, "resolve_options comes first"
        return machine.gpu_free_bytes
    return machine.host_free_bytes - host_bytes


def _resolve_context(shape: ModelShape, options: LoadOptions, reasons: dict[str, str]) -> int:
    if options.ctx_size is None:
        context_tok = min(shape.max_context_tok, DEFAULT_CONTEXT_TOK)
        reasons["ctx_size"] = (
            f"{context_tok}: the model's {shape.max_context_tok}, at most {DEFAULT_CONTEXT_TOK} unless asked for"
        )
        return context_tok
    if options.ctx_size > shape.max_context_tok:
        raise UsageError(
            f"ctx_size {options.ctx_size} is longer than the {shape.max_context_tok} tokens the model was made for; "
            f"use at most {shape.max_context_tok}."
        )
    return options.ctx_size


def _resolve_budget(
    needs: MemoryNeeds, options: LoadOptions, fixed_bytes: int, free_bytes: int, reasons: dict[str, str]
) -> int:
    if options.device_memory is not None:
        return options.device_memory
    bank_bytes = needs.base_bytes if options.records == "mixed" and options.base_memory is None else 0
    all_bytes = fixed_bytes + bank_bytes + needs.num_records * needs.slot_bytes
    share = _GPU_SHARE if options.device == "cuda" else _HOST_SHARE
    share_bytes = int(share * free_bytes)
    if all_bytes <= share_bytes:
        reasons["device_memory"] = f"{format_bytes(all_bytes)}: every expert fits"
        return all_bytes
    reasons["device_memory"] = f"{format_bytes(share_bytes)}: {share:.0%} of the {format_bytes(free_bytes)} free"
    return share_bytes


def _default_rows(options: LoadOptions) -> str:
    if options.mode == "on_demand":
        return f"{options.row_bucket}: on demand a pass takes one token"
    device = "a GPU" if options.device == "cuda" else "a CPU"
    return f"{options.row_bucket}: most tokens of a verify pass, a draft and one more; the default on {device}"


def _shorter_context(needs: MemoryNeeds, options: LoadOptions, budget_bytes: int, context_tok: int) -> str:
    """What a shorter context would change of a budget that is too small."""
    if context_tok <= SHORT_CONTEXT_TOK:
        return ""
    least_bytes = least_memory_bytes(needs, replace(options, ctx_size=SHORT_CONTEXT_TOK))
    if least_bytes <= budget_bytes:
        return ", or a shorter --ctx-size"
    return f", or {format_at_least(least_bytes)} with --ctx-size {SHORT_CONTEXT_TOK}"


def _missing(fixed: _Fixed, needs: MemoryNeeds, budget_bytes: int, shorter: str) -> str:
    least_bytes = fixed.num_bytes + needs.slot_bytes
    return (
        f"The memory budget of {format_bytes(budget_bytes)} is {format_bytes(least_bytes - budget_bytes)} too small: "
        f"dense weights {format_bytes(needs.dense_bytes)}, INT4 base {format_bytes(fixed.base_bytes)}, "
        f"KV cache {format_bytes(fixed.kv_bytes)}, workspace {format_bytes(fixed.workspace_bytes)} and one expert "
        f"{format_bytes(needs.slot_bytes)} must fit; "
        f"give at least {format_at_least(least_bytes)}{shorter}."
    )


def _check_available(plan: MemoryPlan, machine: Machine) -> None:
    if plan.device == "cuda":
        _check_gpu(plan, machine.gpu_free_bytes or 0)
        return
    wanted_bytes = plan.total_bytes + plan.host_bytes
    if wanted_bytes > machine.host_free_bytes:
        raise BudgetError(
            f"The engine would take {format_bytes(wanted_bytes)} and only {format_bytes(machine.host_free_bytes)} of "
            f"host memory are free, {format_bytes(wanted_bytes - machine.host_free_bytes)} too little; "
            f"lower --device-memory or --host-memory."
        )


def _check_gpu(plan: MemoryPlan, free_bytes: int) -> None:
    """The context is there already when the driver is asked what is free."""
    wanted_bytes = plan.total_bytes - sum(figure.num_bytes for figure in plan.workspace if figure.name == "context")
    if wanted_bytes > free_bytes:
        raise BudgetError(
            f"The engine would take {format_bytes(wanted_bytes)} and only {format_bytes(free_bytes)} of the GPU's "
            f"memory are free, {format_bytes(wanted_bytes - free_bytes)} too little; "
            f"lower --device-memory, or end what else runs there."
        )
