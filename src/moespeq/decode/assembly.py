"""From an open store to an engine: plan, then load, then tie the parts together. The only place that knows them all."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path

import torch

from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine
from moespeq.decode.engine_parts import EngineParts
from moespeq.decode.failures import give_memory_back
from moespeq.decode.link_meter import LinkMeter
from moespeq.decode.loop import SpeculativeLoop
from moespeq.decode.planning import plan_of
from moespeq.decode.prefix_cache import PrefixCache
from moespeq.decode.tier import Tier, governor_for, residency_options
from moespeq.decode.tier_cpu import cpu_tier
from moespeq.model.image_reader import ImageReader
from moespeq.model.loading import compute_dtype, load_config, load_generation_config
from moespeq.model.tokenizer import Tokenizer
from moespeq.plan import MemoryPlan, most_image_tok
from moespeq.progress import Meter, ProgressSink
from moespeq.store import Store
from moespeq.transfer import MonotonicClock

__all__ = ["open_engine"]

_log = logging.getLogger(__name__)

# Rows x top-k over experts from which on a prefill streams all of a layer's records: where nothing is known of its
# routes, most are needed soon; where the draft foresees what its first rows need, the others may as well be asked for.
_STREAMED_ROUTES_PER_EXPERT, _STREAMED_BESIDE_FORESIGHT = 2, 64


def open_engine(
    path: Path,
    options: LoadOptions,
    *,
    dtype: torch.dtype | None = None,
    progress: ProgressSink | None = None,
) -> Engine:
    """Load the store at `path`. Raises BudgetError before anything is loaded when it does not fit.

    dtype: what dense weights and products are computed in, by default as `compute_dtype` says; the experts' weights are
    the same bits in any that holds them.
    progress: hears of dense weights and base as they are read, and of what is done before and behind that; host memory
    fills later, see `Engine.host_fill`.
    """
    store = Store.open(path)
    try:
        asked, (options, plan) = options, plan_of(store, options)
        engine = _assemble(store, options, plan, dtype, Meter(progress, plan.dense_bytes + plan.base_bytes))
    except BaseException as error:
        store.close()
        give_memory_back(error)
        raise
    _report(engine, is_draft_lost=asked.has_draft and asked.k != 0 and not options.has_draft)
    return engine


def _report(engine: Engine, *, is_draft_lost: bool) -> None:
    """What was loaded, a warning where no draft fits, and at debug level why each figure is what it is."""
    plan, options = engine.plan, engine.options
    facts = {
        "device": options.device,
        "device_bytes": plan.total_bytes,
        "host_bytes": plan.host_bytes,
        "slots": plan.num_slots,
        "context_tok": plan.context_tok,
        "rows": options.row_bucket,
        "k": options.k,
        "records": options.records,
    }
    _log.info("%s is loaded", engine.manifest.name, extra={"facts": facts})
    if is_draft_lost and "records" in plan.reasons:
        reason = plan.reasons["records"].partition(": ")[2]
        _log.warning("%s decodes without a draft: %s", engine.manifest.name, reason)
    for name, reason in plan.reasons.items():
        _log.debug("plan: %s: %s", name, reason)


def _assemble(store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype | None, meter: Meter) -> Engine:
    manifest, config, clock = store.manifest, load_config(store.model_folder), MonotonicClock()
    dtype = dtype or compute_dtype(config, manifest.layouts)
    meter.add(0, "building the model")
    tier = _tier(store, options, plan, dtype, clock, meter)
    meter.add(0, "making caches and tokenizer ready")
    streamed = _STREAMED_BESIDE_FORESIGHT if tier.runner.foresees else _STREAMED_ROUTES_PER_EXPERT
    prefixes = PrefixCache(
        tier.runner,
        chunk_rows=options.prefill_rows,
        budget_bytes=plan.prefix_bytes,
        allocate=tier.prefix_memory,
    )
    prefixes.reserve()
    loop = SpeculativeLoop(
        tier.runner,
        tier.residency,
        governor_for(options, tier.plan.depth),
        clock,
        link=LinkMeter(tier.take_moves, tier.residency.take_stalls),
        prefill_rows=options.prefill_rows,
        stream_from_rows=math.ceil(streamed * manifest.num_experts / manifest.top_k),
        prefixes=prefixes,
    )

    tokenizer = Tokenizer.load(store.model_folder)
    most_tok = most_image_tok(options, tier.plan.context_tok)

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
            tokenizer=tokenizer,
            images=None if tokenizer is None else ImageReader(config, store.model_folder, tokenizer, most_tok),
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


def _tier(
    store: Store, options: LoadOptions, plan: MemoryPlan, dtype: torch.dtype, clock: MonotonicClock, meter: Meter
) -> Tier:
    if options.device == "cuda":
        from moespeq.decode.tier_cuda import cuda_tier  # triton, which a CPU needs not have

        return cuda_tier(store, options, plan, dtype, clock, meter)
    return cpu_tier(store, options, plan, dtype, clock, meter)
