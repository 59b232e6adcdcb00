"""Offloading on demand becomes moespeq in five steps, each of which adds one thing: what did it bring?

Then the policy alone is exchanged, at one fixed depth with nested records: ours, LRU, LFU and the chunk plan, each of
them measured on the engine, and the bytes that Belady's rule would have moved for the very rounds of ours.

Every step answers the same prompt in the same memory over the same link, greedily, from an empty device. On a CPU plain
records are stored ones, so a second store is made; on a GPU they are decoded from nested ones into host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moespeq.api import load
from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.decode.recording import record
from moespeq.errors import UsageError
from moespeq.nested import Layout
from moespeq.prepare import is_store, prepare_cached, resolve_source
from moespeq.progress import Meter, ProgressSink
from moespeq.replay.policies import ByteBounds, byte_bounds
from moespeq.replay.what_if import recorded_setting, routed

__all__ = [
    "POLICY_STEPS",
    "AblationRow",
    "AblationStep",
    "MeasuredPolicies",
    "run_ablation",
    "run_policies",
    "steps_of",
]


@dataclass(frozen=True, slots=True)
class AblationStep:
    """An engine: its options beside those that all share. is_plain: whole bf16 records cross the link."""

    name: str
    is_plain: bool
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AblationRow:
    """What a step's engine did."""

    step: AblationStep
    num_slots: int
    result: GenerationResult

    @property
    def seconds_per_tok(self) -> float:
        stats = self.result.stats
        return stats.decode_s / stats.committed if stats.committed else 0.0

    @property
    def bytes_per_tok(self) -> float:
        """Over the link, per committed token, the prompt left out."""
        stats = self.result.stats
        return (stats.link_bytes - stats.prefill.link_bytes) / max(1, stats.committed)

    @property
    def shares(self) -> dict[str, float]:
        """Hit, late and miss of the experts that rounds used; wasted of the bytes moved; stall of the decode time."""
        stats = self.result.stats
        used = {name: sum(getattr(report, name) for report in stats.reports) for name in ("hits", "late", "misses")}
        total = max(1, sum(used.values()))
        return {
            **{name: count / total for name, count in used.items()},
            "wasted": stats.wasted_bytes / max(1, stats.link_bytes),
            "stall": sum(report.stall_s for report in stats.reports) / max(stats.decode_s, 1e-9),
        }


POLICY_STEPS = (
    AblationStep("ours", False, {"eviction": "next_use"}),
    AblationStep("LRU", False, {"eviction": "lru"}),
    AblationStep("LFU", False, {"eviction": "lfu"}),
    AblationStep("chunk plan", False, {"eviction": "chunk"}),
)


@dataclass(frozen=True, slots=True)
class MeasuredPolicies:
    """A row for each of POLICY_STEPS; bounds: of the rounds of the first."""

    rows: Sequence[AblationRow]
    bounds: ByteBounds


def steps_of(k: int) -> Sequence[AblationStep]:
    """From on demand to everything; `k` is the draft length where it is fixed."""
    fixed, lru = {"k": k}, {"eviction": "lru"}
    return (
        AblationStep("on demand, LRU", True, {"mode": "on_demand"}),
        AblationStep("+ INT4 draft", True, {**fixed, **lru, "prefetch": False}),
        AblationStep("+ prefetch", True, fixed),
        AblationStep("+ governor", True, {"k": "auto"}),
        AblationStep("+ nested records", False, {"k": "auto"}),
    )


def run_ablation(
    source: str | Path,
    prompt: str | Sequence[int],
    *,
    k: int | None,
    max_new_tokens: int,
    common: Mapping[str, Any],
    progress: ProgressSink | None = None,
    tokens: ProgressSink | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> Iterator[AblationRow]:
    """One row after the other, as each is measured. `common` are load options; k: None for as many as the rows allow.
    progress: hears of preparing and loading; tokens: of every answer.

    Raises UsageError on a CPU for a store, which has one record form, and whatever loading raises.
    """
    on_gpu = _is_on_gpu(common)
    if not on_gpu and is_store(resolve_source(source)):
        raise UsageError(f"{source} is a store of one record form; on a CPU the ablation needs the checkpoint for two.")
    steps = steps_of(_fixed_depth(k, common))
    for step in steps:  # what one of them cannot be asked is said before any ran
        LoadOptions.from_mapping({**common, **step.options})
    for step in steps:
        on_step(step.name)
        options = {**common, **step.options}
        model: str | Path = source
        if on_gpu and step.is_plain:
            options["records"] = "plain"
        elif not on_gpu:
            layout = Layout.PLAIN if step.is_plain else Layout.FIXED
            model = prepare_cached(source, layout=layout, device="cpu", progress=progress)
        with load(model, progress=progress, **options) as engine:
            result = _answer(engine, prompt, max_new_tokens, tokens, step.name)
            yield AblationRow(step, engine.plan.num_slots, result)


def run_policies(
    source: str | Path,
    prompt: str | Sequence[int],
    *,
    k: int | None,
    max_new_tokens: int,
    common: Mapping[str, Any],
    progress: ProgressSink | None = None,
    tokens: ProgressSink | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> MeasuredPolicies:
    """The policies in one engine, one after the other, each from empty slots. Arguments as of run_ablation.

    Raises what loading raises.
    """
    depth = _fixed_depth(k, common)
    if not _is_on_gpu(common):
        source = prepare_cached(source, layout=Layout.FIXED, device="cpu", progress=progress)
    with load(source, progress=progress, **{**common, "k": depth}) as engine:
        num_slots, (ours, *others) = engine.plan.num_slots, POLICY_STEPS
        on_step(ours.name)
        engine.retune(**ours.options)
        recording = record(
            engine, prompt, progress=None if tokens is None else tokens.update, **_sampling(max_new_tokens)
        )
        rows = [AblationRow(ours, num_slots, recording.result)]
        for step in others:
            on_step(step.name)
            engine.retune(**step.options)
            rows.append(AblationRow(step, num_slots, _answer(engine, prompt, max_new_tokens, tokens, step.name)))
    setting = recorded_setting(recording.trace)
    return MeasuredPolicies(rows, byte_bounds(routed(recording.trace, setting), setting))


def _sampling(max_new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}


def _answer(
    engine: Engine, prompt: str | Sequence[int], max_new_tokens: int, tokens: ProgressSink | None, name: str
) -> GenerationResult:
    stream = engine.stream(prompt, **_sampling(max_new_tokens))
    meter = Meter(tokens, stream.limit_tok)
    for piece in stream:
        meter.add(len(piece.tokens), name)
    return stream.result


def _is_on_gpu(common: Mapping[str, Any]) -> bool:
    device = LoadOptions.from_mapping(common).device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _fixed_depth(k: int | None, common: Mapping[str, Any]) -> int:
    """None is as deep as the rows allow."""
    device = "cuda" if _is_on_gpu(common) else "cpu"
    return replace(LoadOptions.from_mapping(common), device=device).row_bucket - 1 if k is None else k  # type: ignore[arg-type]
