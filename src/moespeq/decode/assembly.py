"""From an open store to an engine: plan, then load, then tie the parts together. The only place that knows them all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine, EngineParts
from moespeq.decode.loop import ROW_TILE, SpeculativeLoop
from moespeq.errors import UsageError
from moespeq.hardware.cores import physical_cores
from moespeq.hardware.memory import available_host_bytes
from moespeq.model.loading import describe, load_config, load_generation_config, load_without_experts
from moespeq.model.row_probe import rows_agree
from moespeq.model.runner import Runner
from moespeq.model.tokenizer import Tokenizer
from moespeq.model.weights import BaseBank, ExpertWeights
from moespeq.nested import Layout
from moespeq.plan import MemoryNeeds, MemoryPlan, plan_memory
from moespeq.ports import Clock, RecordSource
from moespeq.residency import (
    AmortizingDepth,
    Eviction,
    FixedDepth,
    Governor,
    GovernorOptions,
    Residency,
    ResidencyOptions,
)
from moespeq.store import DiskSource, Store
from moespeq.transfer import (
    HostCache,
    MonotonicClock,
    PacedSource,
    SlotArena,
    ThreadMover,
    slot_stride_bytes,
)

__all__ = ["needs_of", "open_engine", "plan_of"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_STREAMED_ROUTES_PER_EXPERT = 2  # rows x top-k over experts from which on a prefill needs nearly all of a layer


def needs_of(store: Store) -> MemoryNeeds:
    """What the model of a store needs, from its manifest and configuration alone."""
    manifest = store.manifest
    config = load_config(store.model_folder)
    shape = describe(
        config,
        num_moe_layers=manifest.num_layers,
        num_experts=manifest.num_experts,
        top_k=manifest.top_k,
        matrices=list(manifest.matrices),
    )
    num_records = manifest.num_layers * manifest.num_experts
    return MemoryNeeds(
        shape=shape,
        dense_bytes=sum(entry.num_bytes for file in store.dense_files() for entry in file.entries),
        base_bytes=manifest.base_file_bytes,
        slot_bytes=slot_stride_bytes(store.max_record_bytes()),
        num_records=num_records,
    )


def plan_of(store: Store, options: LoadOptions) -> MemoryPlan:
    """Where the memory of an engine would go on this machine. Raises BudgetError or UsageError."""
    _check_mode(store, options)
    return plan_memory(needs_of(store), options, available_bytes=available_host_bytes(), num_cores=physical_cores())


def open_engine(path: Path, options: LoadOptions, *, dtype: torch.dtype = torch.bfloat16) -> Engine:
    """Load the store at `path`. Raises BudgetError before anything is loaded when it does not fit.

    dtype: what dense weights and products are computed in; the experts' weights are the same bits in any.
    """
    store = Store.open(path)
    try:
        plan = plan_of(store, options)
        return _assemble(store, options, plan, dtype)
    except BaseException:
        store.close()
        raise


def _check_mode(store: Store, options: LoadOptions) -> None:
    is_plain = all(layout is Layout.PLAIN for layout in store.manifest.layouts)
    if options.mode == "on_demand" and not is_plain:
        raise UsageError(
            f"{store.path} holds nested records, which need the base in memory; on_demand runs from a store made by "
            f"`moespeq prepare --format plain`."
        )


def _assemble(store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype) -> Engine:
    manifest, config = store.manifest, load_config(store.model_folder)
    torch.set_num_threads(plan.threads)
    model = load_without_experts(config, _dense_tensors(store), dtype)
    plan = _check_threads(model, manifest.shapes, options, plan)
    runner = Runner(model, context_tok=plan.context_tok, rows=options.row_bucket)
    arena = SlotArena(num_slots=plan.num_slots, slot_bytes=plan.slot_bytes)
    clock = MonotonicClock()
    source = _source(store, options, plan, clock)
    mover = ThreadMover(source, arena.slots(), num_threads=options.link_threads, clock=clock)
    residency = Residency(
        mover,
        clock,
        num_slots=plan.num_slots,
        num_layers=manifest.num_layers,
        num_experts=manifest.num_experts,
        num_bytes=source.num_bytes,
        options=_residency_options(options),
    )
    weights = ExpertWeights(
        slots=torch.frombuffer(arena.memory(), dtype=torch.uint8).view(plan.num_slots, -1),
        layouts=manifest.layouts,
        shapes=manifest.shapes,
        fmt=manifest.base_format,
        bank=None if options.mode == "on_demand" else _load_bank(store),
    )
    loop = SpeculativeLoop(
        runner,
        weights,
        residency,
        _governor(options),
        clock,
        prefill_rows=options.prefill_rows,
        stream_from_rows=math.ceil(_STREAMED_ROUTES_PER_EXPERT * manifest.num_experts / manifest.top_k),
    )

    def close() -> None:
        mover.close()
        store.close()

    return Engine(
        EngineParts(
            options=options,
            plan=plan,
            runner=runner,
            loop=loop,
            residency=residency,
            clock=clock,
            tokenizer=Tokenizer.load(store.model_folder),
            generation_config=load_generation_config(store.model_folder, config),
            vocab_size=config.get_text_config().vocab_size,
            close=close,
        )
    )


def _check_threads(
    model: nn.Module, shapes: Sequence[tuple[int, int]], options: LoadOptions, plan: MemoryPlan
) -> MemoryPlan:
    """Keep the planned threads only where a row's bits do not depend on its place.

    Raises UsageError where they do and the threads were asked for: an explicit option is never overruled in silence.
    """
    is_one_row = options.row_bucket == 1  # which has no other place to stand in
    if plan.threads == 1 or is_one_row or rows_agree(model, shapes, rows=options.row_bucket, row_tile=ROW_TILE):
        return plan
    if options.threads is not None:
        raise UsageError(
            f"With {options.threads} threads this CPU rounds a row by its place in a pass, "
            f"so a text would depend on k; use threads=1."
        )
    torch.set_num_threads(1)
    reason = f"1: with {plan.threads} threads this CPU rounds a row by its place in a pass"
    return replace(plan, threads=1, reasons={**plan.reasons, "threads": reason})


def _dense_tensors(store: Store) -> Mapping[str, torch.Tensor]:
    """Every dense tensor under its source name, in memory of its own."""
    return {
        entry.name: torch.from_numpy(data).view(_DTYPES[entry.dtype]).view(entry.shape)
        for entry, data in store.dense_tensors()
        if entry.dtype in _DTYPES
    }


def _load_bank(store: Store) -> BaseBank:
    """All base records in one allocation."""
    manifest = store.manifest
    keys = list(store.keys())
    records = torch.empty(len(keys), store.base_bytes(keys[0]), dtype=torch.uint8)
    for row, key in zip(records, keys, strict=True):
        store.read_base_into(key, memoryview(row.numpy()), verify=True)
    return BaseBank(records, manifest.num_experts, manifest.shapes, manifest.base_format)


def _source(store: Store, options: LoadOptions, plan: MemoryPlan, clock: Clock) -> RecordSource:
    source: RecordSource = DiskSource(store, verify=True)
    if options.link_bytes_per_s is not None:
        source = PacedSource(source, bytes_per_s=options.link_bytes_per_s, clock=clock)
    return HostCache(source, budget_bytes=plan.host_bytes) if plan.host_bytes else source


def _residency_options(options: LoadOptions) -> ResidencyOptions:
    is_on_demand = options.mode == "on_demand"
    return ResidencyOptions(
        prefetch=options.prefetch and not is_on_demand,
        link_depth=2 * options.link_threads,
        eviction=Eviction.LRU if is_on_demand else Eviction.NEXT_USE,
    )


def _governor(options: LoadOptions) -> Governor:
    if options.mode == "on_demand":
        return FixedDepth(0)
    if options.k == "auto":
        return AmortizingDepth(GovernorOptions(k_max=options.row_bucket - 1))
    return FixedDepth(options.k)
