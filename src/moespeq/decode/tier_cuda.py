"""The tier of a CUDA device: slots and base bank in its memory, records in pinned host memory, passes as graphs.

Order of loading: dense weights and the base first, since no token comes without them; then the host arena fills in the
background while the layers are compiled, and the first prompt takes what is not there yet straight from the disk.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from moespeq.config import LoadOptions, format_bytes
from moespeq.decode.base_bank import lend_base, load_bank, resident_bases
from moespeq.decode.failures import is_out_of_memory
from moespeq.decode.tier import Tier, dense_tensors, residency_for
from moespeq.errors import BudgetError
from moespeq.hardware.gpu import require_gpu
from moespeq.kernels.decode import decode_expert
from moespeq.kernels.draft import draft_experts
from moespeq.kernels.geometry import ExpertGeometry
from moespeq.model.experts import DraftExperts, TargetExperts
from moespeq.model.graphs import operators
from moespeq.model.graphs.capture import GraphPool
from moespeq.model.graphs.compiled import release_layers
from moespeq.model.graphs.prefill_experts import PrefillExperts
from moespeq.model.graphs.runner import GraphRunner
from moespeq.model.graphs.suitable import activation_of, why_not_graphs, why_not_kernels
from moespeq.model.graphs.wave_products import DeviceExperts, Release, WaveProducts
from moespeq.model.loading import load_config, load_without_experts
from moespeq.model.passes import Runner
from moespeq.model.runner import EagerRunner
from moespeq.model.weights import BaseBank, ExpertWeights
from moespeq.nested import Layout
from moespeq.plan import MemoryPlan, cuda_scratch_bytes
from moespeq.ports import Clock
from moespeq.progress import Meter
from moespeq.residency import Residency
from moespeq.store import DiskSource, Store
from moespeq.transfer import (
    CudaCopyStream,
    CudaMover,
    CudaPinning,
    HostRecords,
    PinnedArena,
    PlainSource,
    check_records,
    spread,
)

__all__ = ["cuda_tier"]

_NUM_CHECKED = 4


@dataclass(frozen=True, slots=True)
class _Memory:
    """Device memory of the experts, and how their records lie in it."""

    slots: torch.Tensor  # uint8 [S, stride]
    bank: BaseBank | None
    layouts: Sequence[Layout]
    geometry: ExpertGeometry


def cuda_tier(
    store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype, clock: Clock, meter: Meter
) -> Tier:
    """Load everything onto the GPU. Raises UsageError, BudgetError, StorageError or StoreError."""
    try:
        return _load(store, options, plan, dtype, clock, meter)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise BudgetError(
            f"The GPU ran out of memory while loading {format_bytes(plan.total_bytes)}, perhaps to another process; "
            f"free some, or load with a smaller --device-memory."
        ) from error


def _load(store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype, clock: Clock, meter: Meter) -> Tier:
    gpu = require_gpu()
    model = load_without_experts(load_config(store.model_folder), dense_tensors(store, meter), dtype, device="cuda")
    memory = _allocate(store, options, plan, meter)
    source = _source(store, options)
    records = HostRecords(
        source,
        list(store.keys()),
        budget_bytes=plan.host_bytes,
        pinning=CudaPinning(),
        warn=partial(warnings.warn, stacklevel=2),
        numa_node=gpu.numa_node,
    )
    with ExitStack() as opened:
        opened.callback(release_layers, model)
        arenas = opened.enter_context(ExitStack())  # left after the synchronization below
        opened.callback(records.close)
        records.start_filling()
        mover = CudaMover(records, CudaCopyStream(memory.slots), clock=clock, bytes_per_s=options.link_bytes_per_s)
        opened.callback(mover.close)
        opened.callback(torch.cuda.synchronize)  # first of all: launched work may still read pinned tables
        base_of = partial(lend_base, store, records, source.front_bytes)
        bases = resident_bases(store, memory.bank, source.front_bytes, base_of)
        residency = residency_for(store, options, plan, mover, clock, num_bytes=records.num_bytes, bases=bases)
        if options.records != "plain":
            _check_copies(store, records, memory.slots)
        meter.add(0, "compiling kernels, capturing graphs")
        runner, facts = _runner(store, options, plan, model, memory, residency, mover.fence)
        close = opened.pop_all().close
    return Tier(
        plan=plan,
        runner=runner,
        residency=residency,
        pace=mover.pace,
        take_moves=mover.take_moves,
        close=close,
        prefix_memory=partial(_pinned_memory, arenas),
        facts=facts,
        host_fill=lambda: records.fill,
    )


def _check_copies(store: Store, records: HostRecords, slots: torch.Tensor) -> None:
    """Carry a few records to the device and back. Raises StorageError when one came back changed."""
    for key in spread(list(store.keys()), _NUM_CHECKED):
        record, stored_bytes = records.borrow(key), store.record_bytes(key)
        try:
            slots[0, : record.numel()].copy_(record)
            stored = slots[0, record.numel() - stored_bytes : record.numel()]  # behind its base, where that travels
            check_records([(key, stored)], lambda key: store.records[key].record.crc32, "GPU memory")
        finally:
            records.give_back(key)


def _pinned_memory(arenas: ExitStack, pieces: Sequence[int]) -> torch.Tensor:
    """Host memory in pieces pinned one by one, from a thread whose last error nobody asks for; unpinned by `arenas`."""
    arena = PinnedArena(pieces, CudaPinning())
    arenas.callback(arena.close)
    pinner = threading.Thread(target=arena.pin, args=(partial(warnings.warn, stacklevel=2),), name="moespeq-pinner")
    pinner.start()
    pinner.join()
    return arena.tensor()


def _source(store: Store, options: LoadOptions) -> DiskSource | PlainSource:
    if options.records == "plain":
        return PlainSource(store, store.manifest.shapes, store.manifest.base_format, device="cuda")
    return DiskSource(store, verify=True, with_base=options.records in ("mixed", "whole"))


def _allocate(store: Store, options: LoadOptions, plan: MemoryPlan, meter: Meter) -> _Memory:
    manifest = store.manifest
    slots = torch.zeros(plan.num_slots, plan.slot_bytes, dtype=torch.uint8, device="cuda")
    bank = load_bank(store, plan.num_bases, meter=meter, device="cuda")
    layouts = [Layout.PLAIN] * manifest.num_layers if options.records == "plain" else manifest.layouts
    up, down = manifest.shapes
    return _Memory(slots, bank, layouts, ExpertGeometry((up, down), manifest.base_format))


def _runner(
    store: Store,
    options: LoadOptions,
    plan: MemoryPlan,
    model: PreTrainedModel,
    memory: _Memory,
    residency: Residency,
    release: Release,
) -> tuple[Runner, Mapping[str, str]]:
    """Graphs where the model allows them, else passes as torch runs them."""
    manifest, bank = store.manifest, memory.bank
    reason = why_not_graphs(model) or why_not_kernels(memory.layouts)
    if reason is not None:
        eager = _eager_runner(store, options, plan, model, memory, residency, release)
        return eager, {"draft": f"eager: {reason}", "verify": f"eager: {reason}"}
    operators.register()
    model.set_attn_implementation(operators.NAME)
    model.set_experts_implementation(operators.NAME)
    pool = GraphPool(model.device)
    experts = DeviceExperts(
        memory.slots,
        None if bank is None else bank.records,
        memory.geometry,
        memory.layouts,
        manifest.num_experts,
        activation_of(model),
    )
    top_k = manifest.top_k
    runner = GraphRunner(
        model,
        pool,
        context_tok=plan.context_tok,
        rows=options.row_bucket,
        num_layers=manifest.num_layers,
        top_k=top_k,
        draft=None if bank is None else _draft_layer(memory, bank, manifest.num_experts, activation_of(model)),
        products=WaveProducts(experts, residency, pool, rows=options.row_bucket, top_k=top_k, release=release),
        prefill=PrefillExperts(
            experts,
            residency,
            top_k=top_k,
            max_rows=min(options.prefill_rows, plan.context_tok),
            scratch_bytes=cuda_scratch_bytes(memory.geometry.bf16_bytes),
            release=release,
        ),
    )
    runner.warm_up()
    return runner, runner.facts


def _eager_runner(
    store: Store,
    options: LoadOptions,
    plan: MemoryPlan,
    model: PreTrainedModel,
    memory: _Memory,
    residency: Residency,
    release: Release,
) -> EagerRunner:
    weights = ExpertWeights(
        slots=memory.slots,
        layouts=memory.layouts,
        shapes=store.manifest.shapes,
        fmt=store.manifest.base_format,
        bank=memory.bank,
        decode=partial(_decode, memory.geometry),
    )
    return EagerRunner(
        model,
        context_tok=plan.context_tok,
        rows=options.row_bucket,
        draft=DraftExperts(weights),
        target=TargetExperts(weights, residency, release),
    )


def _draft_layer(
    memory: _Memory, bank: BaseBank, num_experts: int, activation: str
) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    def experts(layer: int, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return draft_experts(
            hidden,
            routes,
            weights,
            bank.records,
            first_row=layer * num_experts,
            rows=None if bank.row_map is None else bank.row_map[layer],
            geometry=memory.geometry,
            activation=activation,
        )

    return experts


def _decode(
    geometry: ExpertGeometry, record: torch.Tensor, base: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_expert(record, base, geometry=geometry, layout=layout)
