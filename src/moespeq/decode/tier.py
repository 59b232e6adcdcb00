"""What every device tier is made of, and what CPU and CUDA make in the same way.

A tier is where experts are computed and what feeds it: a runner over a model, slots with a policy, and a link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from moespeq.config import LoadOptions
from moespeq.decode.prefix_cache import Allocate
from moespeq.model.dense_weights import dequantize_dense, loaded_bytes
from moespeq.model.passes import Runner
from moespeq.model.supported import read_quantization
from moespeq.plan import DepthLimits, MemoryPlan
from moespeq.ports import Clock, Mover
from moespeq.progress import Meter
from moespeq.residency import (
    AmortizingDepth,
    Eviction,
    FixedDepth,
    Governor,
    GovernorOptions,
    Residency,
    ResidencyOptions,
    ResidentBases,
)
from moespeq.store import Store
from moespeq.transfer import Move
from moespeq.types import ExpertKey, HostFill

__all__ = ["Tier", "dense_tensors", "governor_for", "residency_for", "residency_options"]

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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class Tier:
    """`facts`: how passes run, for people ("draft": "one CUDA graph a step"). close: releases threads and memory.

    pace: slows the link to bytes a second, None lets it go; take_moves: when it moved, since the last call.
    prefix_memory: gives the prefix cache its memory, once.
    """

    plan: MemoryPlan
    runner: Runner
    residency: Residency
    pace: Callable[[float | None], None]
    take_moves: Callable[[], Sequence[Move]]
    close: Callable[[], None]
    prefix_memory: Allocate
    facts: Mapping[str, str] = field(default_factory=dict)
    host_fill: Callable[[], HostFill] = HostFill


# 0.4 and 2.4 ms of a fast link; a launch takes host and GPU a third of that, however few experts it has.
_GPU_WAVE_BYTES, _GPU_PREFILL_WAVE_BYTES = 20_000_000, 120_000_000


def dense_tensors(store: Store, meter: Meter) -> Mapping[str, torch.Tensor]:
    """Every dense tensor under its source name, in memory of its own; FP8 ones are bf16."""
    tensors = {}
    for entry, data in store.dense_tensors():
        meter.add(loaded_bytes([entry]), "loading all weights: dense")
        if entry.dtype in _DTYPES:
            tensors[entry.name] = torch.from_numpy(data).view(_DTYPES[entry.dtype]).view(entry.shape)
    dequantize_dense(tensors, read_quantization(store.model_folder))
    return tensors


def residency_options(options: LoadOptions, *, link_depth: int) -> ResidencyOptions:
    is_on_demand = options.mode == "on_demand"
    automatic = Eviction.LRU if is_on_demand else Eviction.NEXT_USE
    return ResidencyOptions(
        prefetch=options.prefetch and not is_on_demand,
        link_depth=link_depth,
        lookahead_tok=options.lookahead_tok,
        eviction=automatic if options.eviction == "auto" else Eviction(options.eviction),
        wave_bytes=_GPU_WAVE_BYTES if options.device == "cuda" else 0,
        prefill_wave_bytes=_GPU_PREFILL_WAVE_BYTES if options.device == "cuda" else 0,
    )


def residency_for(
    store: Store,
    options: LoadOptions,
    plan: MemoryPlan,
    mover: Mover,
    clock: Clock,
    *,
    num_bytes: Callable[[ExpertKey], int],
    bases: ResidentBases,
) -> Residency:
    """The policy over a tier's slots; num_bytes: the length of a record, the base in front of it included."""
    return Residency(
        mover,
        clock,
        num_slots=plan.num_slots,
        num_layers=store.manifest.num_layers,
        num_experts=store.manifest.num_experts,
        num_bytes=num_bytes,
        options=residency_options(options, link_depth=plan.link_depth),
        bases=bases,
    )


def governor_for(options: LoadOptions, limits: DepthLimits) -> Governor:
    if not options.has_draft or options.row_bucket == 1:
        return FixedDepth(0)
    if options.k == "auto":
        return AmortizingDepth(
            GovernorOptions(
                k_max=limits.k_max,
                k_min=limits.k_min,
                advised_k=limits.advised_k,
                round_budget_s=limits.round_budget_s,
            )
        )
    return FixedDepth(options.k)
