"""How the target routes over one text: what a cache and a guess could live on. See also cache_study, fidelity_study.

Owns the definitions; everything is a function of the trace's positions alone, whatever the recorded run's rounds were.
Chance, the thing to compare with, is a router that draws K of E experts uniformly and afresh for every token.
Shapes: N positions, L MoE layers, E experts a layer, K experts a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from moespeq.errors import TraceError
from moespeq.replay.cache_study import CacheStudy, study_cache
from moespeq.replay.fidelity_study import AcceptanceStudy, FidelityStudy, study_acceptance, study_fidelity
from moespeq.replay.routing_trace import Routes, RoutingTrace

__all__ = ["DistinctExperts", "Entropy", "Reuse", "TraceStudy", "study_trace"]

REUSE_WINDOWS_TOK = (1, 2, 4, 8)
MOST_ROWS = 33
_CACHE_ROWS = (1, 9, 33)
_MOST_STARTS = 500  # windows of distinct experts begin at this many places at most, evenly spaced


@dataclass(frozen=True, slots=True)
class Entropy:
    """How evenly a layer's experts are used.

    bits [L]: H = -sum over e of p_e log2 p_e, p_e the share of the layer's uses that went to expert e;
    max_bits: log2(E), all alike. 2^H is how many equally popular experts would give the same entropy.
    """

    bits: Sequence[float]
    max_bits: float

    @property
    def mean_bits(self) -> float:
        """Over the layers."""
        return fmean(self.bits)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Whether the last tokens tell the next one's experts.

    share [W][L]: |T_i & (T_{i-1} | ... | T_{i-w})| / K, T_i the experts of position i, a mean over i >= w, for each
    window w of windows_tok; chance [W]: 1 - (1 - K/E)^w.
    """

    windows_tok: Sequence[int]
    share: Sequence[Sequence[float]]
    chance: Sequence[float]

    @property
    def mean(self) -> list[float]:
        """[W]: over the layers."""
        return [fmean(layers) for layers in self.share]


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """How many records a pass needs.

    count [R][L]: |T_i | ... | T_{i+r-1}| for rows r = 1..R, a mean over windows of the text; uniform [R]:
    E (1 - (1 - K/E)^r).
    """

    count: Sequence[Sequence[float]]
    uniform: Sequence[float]

    @property
    def mean(self) -> list[float]:
        """[R]: over the layers."""
        return [fmean(layers) for layers in self.count]


@dataclass(frozen=True, slots=True)
class TraceStudy:
    """All of it, with what it is of. cache_share: slots of the recorded run as a share of all routed experts."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    num_positions: int
    cache_share: float
    entropy: Entropy
    reuse: Reuse
    distinct: DistinctExperts
    cache: Sequence[CacheStudy]
    fidelity: FidelityStudy
    acceptance: AcceptanceStudy


def study_trace(trace: RoutingTrace) -> TraceStudy:
    """Raises TraceError where the text is too short to say anything about the next token."""
    head, num_positions = trace.header, len(trace.positions)
    if num_positions < 2:
        raise TraceError(f"The trace has {num_positions} generated token(s) and 2 are needed; record a longer text.")
    routes = [position.true for position in trace.positions]
    sets = [[frozenset(token[layer]) for token in routes] for layer in range(head.num_layers)]
    return TraceStudy(
        model=head.model,
        num_layers=head.num_layers,
        num_experts=head.num_experts,
        top_k=head.top_k,
        num_positions=num_positions,
        cache_share=head.num_slots / (head.num_layers * head.num_experts),
        entropy=_entropy(routes, head.num_layers, head.num_experts),
        reuse=_reuse(sets, head.num_experts, head.top_k),
        distinct=_distinct(sets, head.num_experts, head.top_k),
        cache=[study_cache(routes, rows=rows, num_experts=head.num_experts) for rows in _CACHE_ROWS],
        fidelity=study_fidelity(trace),
        acceptance=study_acceptance(trace),
    )


def _entropy(routes: Sequence[Routes], num_layers: int, num_experts: int) -> Entropy:
    counts = [Counter(expert for token in routes for expert in token[layer]) for layer in range(num_layers)]
    return Entropy([_bits(list(count.values())) for count in counts], math.log2(num_experts))


def _bits(counts: Sequence[int]) -> float:
    total = sum(counts)
    return sum(-count / total * math.log2(count / total) for count in counts)


def _reuse(sets: Sequence[Sequence[frozenset[int]]], num_experts: int, top_k: int) -> Reuse:
    windows = [window for window in REUSE_WINDOWS_TOK if window < len(sets[0])]
    share = [[_reused(layer, window) / top_k for layer in sets] for window in windows]
    return Reuse(windows, share, [1 - (1 - top_k / num_experts) ** window for window in windows])


def _reused(tokens: Sequence[frozenset[int]], window_tok: int) -> float:
    """A token's experts that one of the `window_tok` tokens before it used, a mean."""
    places = range(window_tok, len(tokens))
    return fmean(len(tokens[place] & frozenset().union(*tokens[place - window_tok : place])) for place in places)


def _distinct(sets: Sequence[Sequence[frozenset[int]]], num_experts: int, top_k: int) -> DistinctExperts:
    rows = range(1, min(MOST_ROWS, len(sets[0])) + 1)
    per_layer = [_distinct_of(layer, len(rows)) for layer in sets]
    uniform = [num_experts * (1 - (1 - top_k / num_experts) ** num_rows) for num_rows in rows]
    return DistinctExperts([list(counts) for counts in zip(*per_layer, strict=True)], uniform)


def _distinct_of(tokens: Sequence[frozenset[int]], most_rows: int) -> list[float]:
    """[R]: distinct experts of r rows in a row, a mean over windows that lie in the text."""
    num_starts = len(tokens) - most_rows + 1
    totals = [0] * most_rows
    starts = range(0, num_starts, -(-num_starts // _MOST_STARTS))
    for start in starts:
        seen: set[int] = set()
        for row in range(most_rows):
            seen |= tokens[start + row]
            totals[row] += len(seen)
    return [total / len(starts) for total in totals]
