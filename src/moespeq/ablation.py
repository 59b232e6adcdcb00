"""Offloading on demand becomes moespeq in five steps, each of which adds one thing: what did it bring?

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
from moespeq.decode.generation import GenerationResult
from moespeq.errors import UsageError
from moespeq.nested import Layout
from moespeq.prepare import ProgressSink, is_store, prepare_cached, resolve_source

__all__ = ["AblationRow", "AblationStep", "run_ablation", "steps_of"]


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
    on_step: Callable[[str], None] = lambda name: None,
) -> Iterator[AblationRow]:
    """One row after the other, as each is measured. `common` are load options; k: None for as many as the rows allow.

    Raises UsageError on a CPU for a store, which has one record form, and whatever loading raises.
    """
    shared = LoadOptions.from_mapping(common)
    on_gpu = shared.device == "cuda" or (shared.device == "auto" and torch.cuda.is_available())
    if not on_gpu and is_store(resolve_source(source)):
        raise UsageError(f"{source} is a store of one record form; on a CPU the ablation needs the checkpoint for two.")
    if k is None:
        k = replace(shared, device="cuda" if on_gpu else "cpu").row_bucket - 1
    steps = steps_of(k)
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
            result = engine.generate(prompt, max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
            yield AblationRow(step, engine.plan.num_slots, result)
