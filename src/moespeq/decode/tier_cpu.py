"""The tier of a machine without a GPU: the device is host memory, the link is the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from moespeq.config import LoadOptions
from moespeq.decode.base_bank import load_bank, read_base, resident_bases
from moespeq.decode.tier import Tier, dense_tensors, residency_for
from moespeq.errors import UsageError
from moespeq.model.experts import DraftExperts, TargetExperts
from moespeq.model.loading import load_config, load_without_experts
from moespeq.model.row_probe import rows_agree
from moespeq.model.runner import ROW_TILE, EagerRunner
from moespeq.model.weights import ExpertWeights
from moespeq.plan import MemoryPlan
from moespeq.ports import Clock, RecordSource
from moespeq.progress import Meter
from moespeq.store import DiskSource, Store
from moespeq.transfer import HostCache, PacedSource, SlotArena, ThreadMover

__all__ = ["cpu_tier"]


def cpu_tier(
    store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype, clock: Clock, meter: Meter
) -> Tier:
    """Load the dense model and the base, and open the link. Raises UsageError, BudgetError or StoreError."""
    manifest, config = store.manifest, load_config(store.model_folder)
    torch.set_num_threads(plan.threads)
    model = load_without_experts(config, dense_tensors(store, meter), dtype)
    plan = _check_threads(model, manifest.shapes, options, plan)
    arena = SlotArena(num_slots=plan.num_slots, slot_bytes=plan.slot_bytes)
    records = DiskSource(store, verify=True, with_base=options.records in ("mixed", "whole"))
    disk = PacedSource(records, bytes_per_s=options.link_bytes_per_s, clock=clock)
    source: RecordSource = HostCache(disk, budget_bytes=plan.host_bytes) if plan.host_bytes else disk
    with ExitStack() as opened:
        mover = ThreadMover(source, arena.slots(), num_threads=options.link_threads, clock=clock)
        opened.callback(mover.close)
        bank = load_bank(store, plan.num_bases, meter=meter)
        bases = resident_bases(store, bank, records.front_bytes, partial(read_base, store))
        residency = residency_for(store, options, plan, mover, clock, num_bytes=source.num_bytes, bases=bases)
        weights = ExpertWeights(
            slots=torch.frombuffer(arena.memory(), dtype=torch.uint8).view(plan.num_slots, -1),
            layouts=manifest.layouts,
            shapes=manifest.shapes,
            fmt=manifest.base_format,
            bank=bank,
        )
        runner = EagerRunner(
            model,
            context_tok=plan.context_tok,
            rows=options.row_bucket,
            draft=DraftExperts(weights),
            target=TargetExperts(weights, residency),
        )
        close = opened.pop_all().close
    return Tier(
        plan=plan,
        runner=runner,
        residency=residency,
        pace=disk.pace,
        take_moves=mover.take_moves,
        close=close,
        prefix_memory=lambda pieces: torch.empty(sum(pieces), dtype=torch.uint8),  # a page is taken at its first write
        facts=dict.fromkeys(("draft", "verify", "prefill"), "eager: this is a CPU"),
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
