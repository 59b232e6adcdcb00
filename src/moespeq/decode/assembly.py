"""From an open store to an engine: plan, then load, then tie the parts together. The only place that knows them all."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moespeq.config import LoadOptions, RecordForm, format_at_least, format_bytes
from moespeq.decode.engine import Engine, EngineParts
from moespeq.decode.failures import give_memory_back
from moespeq.decode.link_meter import LinkMeter
from moespeq.decode.loop import SpeculativeLoop
from moespeq.decode.tier import Tier, governor_for, residency_options
from moespeq.decode.tier_cpu import cpu_tier
from moespeq.errors import BudgetError, UsageError
from moespeq.hardware.cores import physical_cores
from moespeq.hardware.gpu import require_gpu
from moespeq.hardware.memory import available_host_bytes
from moespeq.kernels.geometry import READ_AHEAD_BYTES
from moespeq.model.loading import describe, load_config, load_generation_config
from moespeq.model.tokenizer import Tokenizer
from moespeq.nested import Layout
from moespeq.plan import Machine, MemoryNeeds, MemoryPlan, least_memory_bytes, plan_memory, resolve_options
from moespeq.plan.profile import MachineProfile, default_profile_path
from moespeq.store import DiskSource, Store
from moespeq.transfer import MonotonicClock, host_arena_bytes, plain_record_bytes, slot_stride_bytes

__all__ = ["needs_of", "open_engine", "plan_of"]

# Rows x top-k over experts from which on a prefill streams all of a layer's records: where nothing is known of its
# routes, most are needed soon; where the draft foresees what its first rows need, the others may as well be asked for.
_STREAMED_ROUTES_PER_EXPERT, _STREAMED_BESIDE_FORESIGHT = 2, 64

_ON_DEMAND_RECORDS = {
    "store": "store: its records are plain and need no base",
    "whole": "whole: on demand nothing is drafted and no base is resident, so it travels with its residual",
}


def needs_of(store: Store, records: RecordForm = "store") -> MemoryNeeds:
    """What the model of a store needs, from its manifest and configuration alone, with its records moved like this."""
    manifest = store.manifest
    config = load_config(store.model_folder)
    shape = describe(
        config,
        num_moe_layers=manifest.num_layers,
        num_experts=manifest.num_experts,
        top_k=manifest.top_k,
        matrices=list(manifest.matrices),
    )
    source = DiskSource(store, with_base=records in ("mixed", "whole"))
    plain_bytes = plain_record_bytes(manifest.shapes) if records == "plain" else None
    keys = list(store.keys())
    num_bytes = {key: plain_bytes or source.num_bytes(key) for key in keys}
    return MemoryNeeds(
        shape=shape,
        dense_bytes=sum(entry.num_bytes for file in store.dense_files() for entry in file.entries),
        base_bytes=manifest.base_file_bytes,
        slot_bytes=slot_stride_bytes(max(num_bytes.values()) + READ_AHEAD_BYTES),
        num_records=len(num_bytes),
        records_bytes=host_arena_bytes(num_bytes),
        model=manifest.name,
    )


def plan_of(store: Store, options: LoadOptions) -> tuple[LoadOptions, MemoryPlan]:
    """The options with device and records chosen, and where an engine's memory would go on this machine.

    Raises BudgetError or UsageError.
    """
    machine = _machine(options)
    *first_choice, last = _choices(store, resolve_options(options, machine))
    for choice in first_choice:
        with suppress(BudgetError):
            return choice, plan_memory(needs_of(store, choice.records), choice, machine)
    plan = plan_memory(needs_of(store, last.records), last, machine)
    for choice in first_choice:
        least = format_at_least(least_memory_bytes(needs_of(store, choice.records), choice))
        reason = f"{last.records}: with all of the base an engine takes at least {least}"
        plan = replace(plan, reasons={**plan.reasons, "records": reason})
    if options.records == "auto" and options.mode == "on_demand":
        plan = replace(plan, reasons={**plan.reasons, "records": _ON_DEMAND_RECORDS[last.records]})
    return last, plan


def _choices(store: Store, options: LoadOptions) -> list[LoadOptions]:
    """What "auto" records may become, in order of preference. Raises UsageError where a choice cannot run."""
    is_plain = all(layout is Layout.PLAIN for layout in store.manifest.layouts)
    if options.mode == "on_demand" and options.records == "store" and not is_plain:
        raise UsageError(
            f"{store.path} holds nested records, and on_demand keeps no base in memory to complete them; use "
            f"records='whole', or a store made by `moespeq prepare --format plain`."
        )
    if options.records == "plain" and options.device == "cpu":
        raise UsageError(
            "Plain records are decoded for a GPU; a CPU takes a store made by `moespeq prepare --format plain`."
        )
    if options.base_memory is not None:
        return [_with_base_memory(store, options, options.base_memory)]
    if options.records != "auto":
        return [options]
    if options.mode == "on_demand":
        return [replace(options, records="store" if is_plain else "whole")]
    is_draft_asked = options.k not in ("auto", 0)
    otherwise = replace(options, records="mixed") if is_draft_asked else replace(options, records="whole", k=0)
    return [replace(options, records="store"), otherwise]


def _with_base_memory(store: Store, options: LoadOptions, base_memory: int) -> LoadOptions:
    """`base_memory` as the records it makes travel. Raises UsageError when it leaves nothing to draft with."""
    if base_memory >= store.manifest.base_file_bytes:
        return replace(options, records="store", base_memory=None)
    row_bytes = -(-store.manifest.base_file_bytes // (store.manifest.num_layers * store.manifest.num_experts))
    if base_memory >= row_bytes:
        return replace(options, records="mixed")
    if options.k not in ("auto", 0):
        raise UsageError(
            f"base_memory of {format_bytes(base_memory)} holds not one expert's base of {format_at_least(row_bytes)}, "
            f"so k={options.k} has nothing to draft with; give more, or leave k out."
        )
    return replace(options, records="whole", base_memory=None, k=0)


def open_engine(path: Path, options: LoadOptions, *, dtype: torch.dtype = torch.bfloat16) -> Engine:
    """Load the store at `path`. Raises BudgetError before anything is loaded when it does not fit.

    dtype: what dense weights and products are computed in; the experts' weights are the same bits in any.
    """
    store = Store.open(path)
    try:
        options, plan = plan_of(store, options)
        return _assemble(store, options, plan, dtype)
    except BaseException as error:
        store.close()
        give_memory_back(error)
        raise


def _machine(options: LoadOptions) -> Machine:
    """What is free here, and was measured; a GPU is looked at only if it may be used: that creates its context."""
    path = default_profile_path()
    machine = Machine(
        available_host_bytes(),
        physical_cores(),
        gpu="as asked for",
        profile=MachineProfile.load(path),
        profile_path=path,
    )
    if options.device == "cpu":
        return machine
    try:
        gpu = require_gpu()
    except UsageError as error:
        return replace(machine, gpu=str(error))
    return replace(machine, gpu_free_bytes=gpu.free_bytes, gpu=gpu.name)


def _assemble(store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype) -> Engine:
    manifest, config, clock = store.manifest, load_config(store.model_folder), MonotonicClock()
    tier = _tier(store, options, plan, dtype, clock)
    streamed = _STREAMED_BESIDE_FORESIGHT if tier.runner.foresees else _STREAMED_ROUTES_PER_EXPERT
    loop = SpeculativeLoop(
        tier.runner,
        tier.residency,
        governor_for(options, tier.plan.depth),
        clock,
        link=LinkMeter(tier.take_moves, tier.residency.take_stalls),
        prefill_rows=options.prefill_rows,
        stream_from_rows=math.ceil(streamed * manifest.num_experts / manifest.top_k),
    )

    def close() -> None:
        tier.close()
        store.close()

    return Engine(
        EngineParts(
            options=options,
            manifest=manifest,
            plan=tier.plan,
            runner=tier.runner,
            loop=loop,
            residency=tier.residency,
            retune=partial(_retune, tier, loop),
            facts=tier.facts,
            host_fill=tier.host_fill,
            clock=clock,
            tokenizer=Tokenizer.load(store.model_folder),
            generation_config=load_generation_config(store.model_folder, config),
            vocab_size=config.get_text_config().vocab_size,
            close=close,
        )
    )


def _retune(tier: Tier, loop: SpeculativeLoop, options: LoadOptions) -> None:
    """Go on with other options that take no memory; the slots start empty."""
    tier.pace(options.link_bytes_per_s)
    tier.residency.restart(residency_options(options, link_depth=tier.plan.link_depth))
    loop.use(governor_for(options, tier.plan.depth))


def _tier(store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype, clock: MonotonicClock) -> Tier:
    if options.device == "cuda":
        from moespeq.decode.tier_cuda import cuda_tier  # triton, which a CPU needs not have

        return cuda_tier(store, options, plan, clock)
    return cpu_tier(store, options, plan, dtype, clock)
