"""What a trace says of the run it is of: the model, the machine, the options in effect, and each round as measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.decode.link_meter import merge, overlap_s
from moespeq.decode.params import SamplingParams
from moespeq.decode.statistics import GenerationStats
from moespeq.decode.tier import residency_options
from moespeq.decode.timeline import RoundTimes
from moespeq.hardware.gpu import require_gpu
from moespeq.replay import TraceHeader, TraceRound
from moespeq.transfer import plain_record_bytes
from moespeq.types import StepReport

__all__ = ["header_of", "rounds_of"]

_DIGITS = 7  # of seconds
_LISTS = ("eos_token_ids", "stop")
_NOT_KEPT = ("logits_processors", "seed")


def header_of(
    engine: Engine,
    params: SamplingParams,
    stats: GenerationStats,
    *,
    resident: Sequence[Sequence[int]],
    draft_step_s: float,
) -> TraceHeader:
    """The header of a generation that ended; bandwidth is 0 where nothing crossed the link."""
    manifest = engine.manifest
    is_plain = engine.options.records == "plain"
    return TraceHeader(
        model=manifest.name,
        model_type=manifest.model_type,
        num_layers=manifest.num_layers,
        num_experts=manifest.num_experts,
        top_k=manifest.top_k,
        record_bytes=_mean_by_layer(engine.record_bytes, manifest.num_experts),
        plain_record_bytes=plain_record_bytes(manifest.shapes),
        base_bytes=-(-manifest.base_file_bytes // (manifest.num_layers * manifest.num_experts)),
        layout="plain" if is_plain else "+".join(sorted({layout.value for layout in manifest.layouts})),
        num_slots=engine.plan.num_slots,
        device=require_gpu().name if engine.options.device == "cuda" else "cpu",
        link_bytes_per_s=stats.link_bytes / stats.link_busy_s if stats.link_busy_s > 0 else 0.0,
        resident=resident,
        draft_step_s=draft_step_s,
        prompt_tok=stats.prompt_tok,
        options=_options_in_effect(engine) | {"sampling": _sampling(params)},
    )


def rounds_of(reports: Sequence[StepReport], times: Sequence[RoundTimes]) -> list[TraceRound]:
    """The rounds as measured, and when their parts were."""
    names = [field.name for field in fields(TraceRound) if not field.name.startswith("layer_")]
    return [
        TraceRound(
            **{name: getattr(report, name) for name in names}, layer_experts=one.experts[:-1], layer_s=_layer_s(one)
        )
        for report, one in zip(reports, times, strict=True)
    ]


def _layer_s(times: RoundTimes) -> list[float]:
    """[L - 1], see TraceRound."""
    stalls = merge(times.link.stalls)
    return [round(end - begin - overlap_s([(begin, end)], stalls), _DIGITS) for begin, end in pairwise(times.layers_s)]


def _mean_by_layer(record_bytes: Sequence[int], num_experts: int) -> list[int]:
    starts = range(0, len(record_bytes), num_experts)
    return [round(statistics.fmean(record_bytes[start : start + num_experts])) for start in starts]


def _options_in_effect(engine: Engine) -> dict[str, Any]:
    """Those that decide bytes and time, with every "auto" resolved but that of k, which the governor chose."""
    options, plan = engine.options, engine.plan
    policy = residency_options(options, link_depth=plan.link_depth)
    return {
        "k": options.k,
        "rows": options.row_bucket,
        "records": options.records,
        "prefetch": policy.prefetch,
        "lookahead_tok": policy.lookahead_tok,
        "eviction": policy.eviction.value,
        "link_depth": policy.link_depth,
        "link_bytes_per_s": options.link_bytes_per_s,
        "link_threads": options.link_threads,
        "threads": plan.threads,
        "device_memory": plan.total_bytes,
        "host_memory": plan.host_bytes,
        "num_bases": plan.num_bases,
        "ctx_size": plan.context_tok,
        "prefill_rows": options.prefill_rows,
    }


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """As JSON; the seed only where something was drawn with it."""
    kept = [field.name for field in fields(params) if field.name not in _NOT_KEPT]
    values = {name: list(getattr(params, name)) if name in _LISTS else getattr(params, name) for name in kept}
    return values | {"seed": None if params.is_greedy else params.seed}
