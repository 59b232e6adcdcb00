"""A test generation: one prompt, drafted and plain by the same engine, and what the two left in the KV cache.

The claim under test is the product's own: text, keys and values are the same whether anything was drafted or not. A
prefill of the finished text gives keys and values once more, by passes of another shape: close, not equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moespeq.api import load
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.decode.loop import SpeculativeLoop
from moespeq.decode.sampling import Sampler
from moespeq.decode.statistics import GenerationStats
from moespeq.decode.timeline import RoundTimes
from moespeq.doctor.base_probe import BaseFacts, probe_base
from moespeq.doctor.signals import Acceptance, RouteCounts
from moespeq.prepare import ProgressSink, is_store, prepare_cached, resolve_source

__all__ = ["OPTIONS", "SelfTest", "run_self_test"]

_NEW_TOK = 48
OPTIONS: Final = {"k": 8, "ctx_size": 512}
"""What a test generation asks of `load`, whatever else it is asked with."""
_Layers = list[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """first_difference: the first token at which the two texts part, None where they do not. kv_differing: layers whose
    keys or values are not the plain run's, bit for bit. prefill_gap: the largest distance of a position's keys and
    values from a prefill's, as a share of their norm; the median over positions.
    """

    model: str
    device: str
    k: int
    num_tok: int
    first_difference: int | None
    num_layers: int
    kv_differing: int
    prefill_gap: float
    acceptance: Acceptance
    routes: RouteCounts
    base: BaseFacts


def run_self_test(
    model: str | Path, prompt: str | Sequence[int], *, progress: ProgressSink | None = None, **options: Any
) -> SelfTest:
    """Load `model`, with a part of its base where all does not fit, generate, and compare.

    options: those of `load`. Raises what loading raises.
    """
    store = prepare_cached(model, device=options.get("device", "auto"), progress=progress)
    source = resolve_source(model)
    with load(store, progress=progress, **OPTIONS, **options) as engine:
        tokens = engine.encode(prompt)
        drafted, drafted_kv = _generate(engine, tokens)
        engine.retune(k=0)
        plain, plain_kv = _generate(engine, tokens)
        _, prefilled_kv = _generate(engine, [*tokens, *plain.tokens[:-1]], new_tok=1)
        return SelfTest(
            model=engine.manifest.name,
            device=engine.options.device,
            k=OPTIONS["k"],
            num_tok=len(plain.tokens),
            first_difference=_first_difference(drafted.tokens, plain.tokens),
            num_layers=len(plain_kv),
            kv_differing=sum(not _are_equal(ours, theirs) for ours, theirs in zip(drafted_kv, plain_kv, strict=True)),
            prefill_gap=max(_gap(ours, theirs) for ours, theirs in zip(plain_kv, prefilled_kv, strict=True)),
            acceptance=Acceptance.of(drafted.stats.k_per_round, drafted.stats.accepted_per_round),
            routes=_routes(drafted.stats),
            base=probe_base(store, None if is_store(source) else source),
        )


class _KeptCache:
    """An Observer that copies the keys and values a text left."""

    def __init__(self, prompt_tok: int) -> None:
        self._prompt_tok = prompt_tok
        self.layers: _Layers = []

    def hear_prompt(self, resident: Sequence[Sequence[int]]) -> None:
        pass

    def hear_commit(self, position: int, routes: Sequence[Sequence[Sequence[int]]], times: RoundTimes) -> None:
        pass

    def follow(self, loop: SpeculativeLoop, sampler: Sampler, tokens: Sequence[int]) -> Iterator[None]:
        live_tok = self._prompt_tok + len(tokens) - 1  # the last one's are not written yet
        self.layers = [tuple(tensor[0].clone() for tensor in layer) for layer in loop.runner.kv_rows(0, live_tok)]
        return iter(())


def _generate(engine: Engine, tokens: Sequence[int], new_tok: int = _NEW_TOK) -> tuple[GenerationResult, _Layers]:
    kept = _KeptCache(len(tokens))
    result = engine.generate(tokens, max_new_tokens=new_tok, temperature=0.0, ignore_eos=True, observer=kept)
    return result, kept.layers


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    if ours == theirs:
        return None
    shared = zip(ours, theirs, strict=False)
    return next((place for place, (one, other) in enumerate(shared) if one != other), min(len(ours), len(theirs)))


def _are_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _gap(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """The median over positions of |ours - theirs| / |theirs|, of one layer's [heads, n, D]."""
    distance, size = (
        torch.stack([part.float().square().sum(dim=(0, 2)) for part in parts]).sum(dim=0).sqrt()
        for parts in ([one - other for one, other in zip(ours, theirs, strict=True)], theirs)
    )
    return float((distance / size.clamp_min(torch.finfo(torch.float32).tiny)).median())


def _routes(stats: GenerationStats) -> RouteCounts:
    counts = stats.routes
    return RouteCounts(counts.exact + counts.same_set + counts.wrong, counts.wrong)
