"""Routing traces made from a few probabilities, so that what a study must find is known beforehand.

L layers, E experts, K experts a token. Equal arguments give equal traces.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moespeq.replay import RoutingTrace, TraceHeader, TracePosition, TraceRound

__all__ = ["synthetic_trace"]

RECORD_BYTES, PLAIN_BYTES, BASE_BYTES = 9_000_000, 17_300_000, 4_600_000
LINK_BYTES_PER_S = 25e9
DRAFT_STEP_S, VERIFY_LAYER_S = 2e-3, 4e-4
VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class _Chances:
    """What may happen to one token at one layer."""

    stickiness: float
    fidelity: float
    same_set: float
    ahead: float


@dataclass(frozen=True, slots=True)
class _Cut:
    """A round over the positions from `start` on."""

    start: int
    k: int
    accepted: int
    committed: int


def synthetic_trace(
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    num_positions: int = 200,
    seed: int = 0,
    stickiness: float = 0.0,
    fidelity: float = 1.0,
    acceptance: float = 1.0,
    rounds_k: int | Sequence[int] = 8,
    *,
    skew: float = 0.0,
    same_set: float = 0.0,
    ahead: float = 0.5,
    num_slots: int | None = None,
) -> RoutingTrace:
    """A trace of `num_positions` generated tokens.

    stickiness: the chance that a token keeps an expert of the token before it; the others are drawn with weights
    1 / (expert + 1) ** skew, uniform at 0. Stickiness 1: every token has the routes of the first.
    fidelity: the share of layers where the draft's routes are the target's, order included; same_set: where the order
    differs (K > 1); else one expert is another one. ahead: the share of layers, from the second on, where the
    lookahead predictor names the right set. acceptance: the chance that a drafted token is accepted.
    rounds_k: draft length of the rounds, in turn. num_slots: by default a quarter of all experts.
    """
    rng = random.Random(seed)
    chances = _Chances(stickiness, fidelity, same_set, ahead)
    accepted = [rng.random() < acceptance for _ in range(num_positions)]
    cuts = list(_cut(accepted, [rounds_k] if isinstance(rounds_k, int) else rounds_k))
    steps = [step for cut in cuts for step in range(cut.committed)] + [0]
    weights = [(expert + 1) ** -skew for expert in range(num_experts)]
    routes = [_draw([], top_k, weights, rng) for _ in range(num_layers)]
    tokens = [rng.randrange(VOCABULARY) for _ in range(num_positions + 1)]
    positions = []
    for index in range(num_positions):
        if index:
            routes = [_draw(_kept(layer, chances, rng), top_k, weights, rng) for layer in routes]
        positions.append(
            TracePosition(
                token=tokens[index],
                true=routes,
                draft=[_drafted(layer, num_experts, chances, rng) for layer in routes],
                ahead=[[], *(_ahead(layer, num_experts, chances, rng) for layer in routes[1:])],
                step=steps[index],
                drafted=(tokens[index + 1] + (not accepted[index])) % VOCABULARY,
                confidence=rng.uniform(0.6, 1.0) if accepted[index] else rng.uniform(0.1, 0.7),
                accepted=accepted[index],
            )
        )
    num_records = num_layers * num_experts
    header = TraceHeader(
        model="synthetic",
        model_type="qwen2_moe",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        record_bytes=[RECORD_BYTES] * num_layers,
        plain_record_bytes=PLAIN_BYTES,
        base_bytes=BASE_BYTES,
        layout="nested",
        num_slots=max(1, num_records // 4) if num_slots is None else num_slots,
        device="cpu",
        link_bytes_per_s=LINK_BYTES_PER_S,
        resident=[[] for _ in range(num_layers)],
        draft_step_s=DRAFT_STEP_S,
        prompt_tok=32,
        options={"rows": 33, "prefetch": True},
    )
    return RoutingTrace(header, positions, [_measured(cut, positions, header) for cut in cuts])


def _draw(kept: Sequence[int], top_k: int, weights: Sequence[float], rng: random.Random) -> list[int]:
    """K experts: `kept`, then others by weight, without repetition."""
    experts = list(kept)
    keys = [rng.random() ** (1 / weight) for weight in weights]  # the largest K: a weighted sample, none twice
    for expert in sorted(range(len(weights)), key=lambda expert: -keys[expert]):
        if len(experts) == top_k:
            break
        if expert not in kept:
            experts.append(expert)
    return experts


def _kept(layer: Sequence[int], chances: _Chances, rng: random.Random) -> list[int]:
    return [expert for expert in layer if rng.random() < chances.stickiness]


def _drafted(layer: Sequence[int], num_experts: int, chances: _Chances, rng: random.Random) -> list[int]:
    chance = rng.random()
    if chance < chances.fidelity:
        return list(layer)
    if chance < chances.fidelity + chances.same_set:
        return [*layer[1:], layer[0]]
    return _wrong(layer, num_experts, rng)


def _ahead(layer: Sequence[int], num_experts: int, chances: _Chances, rng: random.Random) -> list[int]:
    return list(layer) if rng.random() < chances.ahead else _wrong(layer, num_experts, rng)


def _wrong(layer: Sequence[int], num_experts: int, rng: random.Random) -> list[int]:
    """The last expert is another one, if there is another."""
    others = [expert for expert in range(num_experts) if expert not in layer]
    return [*layer[:-1], rng.choice(others)] if others else list(layer)


def _cut(accepted: Sequence[bool], depths: Sequence[int]) -> Iterator[_Cut]:
    """Rounds that commit all tokens but the first."""
    start, last = 0, len(accepted) - 1
    for k in itertools.cycle(depths):
        if start >= last:
            return
        agreed = len(list(itertools.takewhile(bool, accepted[start : start + k])))
        yield _Cut(start, k, agreed, committed := min(agreed + 1, last - start))
        start += committed


def _measured(cut: _Cut, positions: Sequence[TracePosition], header: TraceHeader) -> TraceRound:
    """A round as a cache of random records would see it: it holds its share, and a twentieth of the rest is late."""
    rows = positions[cut.start : cut.start + cut.k + 1]
    layers = range(header.num_layers)
    uses = sum(len({e for row in rows for e in row.true[layer]}) for layer in layers)
    hits = uses * header.num_slots // (header.num_layers * header.num_experts)
    late = (uses - hits) // 20
    link_bytes = (uses - hits) * RECORD_BYTES
    busy_s = link_bytes / header.link_bytes_per_s
    draft_s = DRAFT_STEP_S * (cut.k + 1) if cut.k else 0.0
    compute_s = VERIFY_LAYER_S * header.num_layers
    stall_s = max(0.0, busy_s - draft_s - compute_s)
    return TraceRound(
        k=cut.k,
        accepted=cut.accepted,
        committed=cut.committed,
        hits=hits,
        late=late,
        misses=uses - hits - late,
        link_bytes=link_bytes,
        used_bytes=link_bytes,
        draft_s=draft_s,
        verify_s=compute_s + stall_s,
        stall_s=stall_s,
        link_busy_s=busy_s,
        layer_experts=[len({e for row in rows for e in row.true[layer]}) for layer in layers[:-1]],
        layer_s=[VERIFY_LAYER_S] * (len(layers) - 1),
    )
