"""What a recorded run would have taken with another link, more memory, another depth or another policy.

A *setting* is what may differ between two replays of one trace; compute times are the trace's own. The replay of the
recorded setting is compared with what was measured: only a model that finds the past is asked about the future.

The slots of a replay start as the recorded prompt left them. What more slots would have held a trace does not say: they
start with other experts, as many of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moespeq.errors import TraceError
from moespeq.replay.driver import Trace
from moespeq.replay.driver import replay as replay_rounds
from moespeq.replay.rounds import rounds_of
from moespeq.replay.routing_trace import RoutingTrace, TraceHeader, TraceRound
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.virtual import LinkModel
from moespeq.residency import Eviction, ResidencyOptions

__all__ = [
    "TRUSTED_SHARE",
    "Outcome",
    "Setting",
    "error_share",
    "recorded_outcome",
    "recorded_setting",
    "replay_setting",
    "routed",
    "slots_at_first",
]

TRUSTED_SHARE = 0.15
"""How far the replay of the recorded setting may be off, of the tokens per second that were measured."""

_LINK_DEPTH = 4  # where a trace does not say
_BEGUN_ON_GPU, _LINK_THREADS = 3, 2


@dataclass(frozen=True, slots=True)
class Setting:
    """k: None is as recorded, round by round; record_bytes [L]; is_eager: see driver.replay."""

    k: int | None
    num_slots: int
    record_bytes: Sequence[int]
    link: LinkModel
    options: ResidencyOptions
    is_eager: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A generation without its prompt.

    Shares: hits, late and misses of the distinct experts that layers asked for; wasted, of the bytes that crossed the
    link; stall, of the time. None where nobody counted it.
    """

    tok_per_s: float
    bytes_per_tok: float
    hit_share: float
    late_share: float
    miss_share: float
    wasted_share: float | None
    stall_share: float


def recorded_setting(trace: RoutingTrace) -> Setting:
    """What the recorded run ran with."""
    header, options = trace.header, trace.header.options
    is_on_demand = options.get("mode") == "on_demand"
    automatic = Eviction.LRU if is_on_demand else Eviction.NEXT_USE
    is_eager = header.device == "cpu"
    num_begun = options.get("link_threads", _LINK_THREADS) if is_eager else _BEGUN_ON_GPU
    return Setting(
        k=None,
        num_slots=header.num_slots,
        record_bytes=header.record_bytes,
        link=LinkModel(header.link_bytes_per_s or math.inf, depth=num_begun),  # 0 where nothing crossed it
        options=ResidencyOptions(
            prefetch=options.get("prefetch", True) and not is_on_demand,
            link_depth=options.get("link_depth", _LINK_DEPTH),
            lookahead_tok=options.get("lookahead_tok"),
            eviction=Eviction(options.get("eviction", automatic)),
        ),
        is_eager=is_eager,
    )


def recorded_outcome(trace: RoutingTrace) -> Outcome:
    """What the recorded run measured. Raises TraceError where it ended before its first round."""
    rounds = _require_rounds(trace)
    hits, late, misses = (sum(getattr(one, name) for one in rounds) for name in ("hits", "late", "misses"))
    committed = sum(one.committed for one in rounds)
    seconds = sum(one.draft_s + one.verify_s for one in rounds)
    asked = max(1, hits + late + misses)
    return Outcome(
        tok_per_s=committed / seconds,
        bytes_per_tok=sum(one.link_bytes for one in rounds) / committed,
        hit_share=hits / asked,
        late_share=late / asked,
        miss_share=misses / asked,
        wasted_share=None,
        stall_share=sum(one.stall_s for one in rounds) / seconds,
    )


def replay_setting(trace: RoutingTrace, setting: Setting, times: ComputeTimes | None = None) -> Outcome:
    """What the trace's text would have taken. Raises TraceError where the trace cannot tell.

    times: of computing, in place of the trace's own.
    """
    result = replay_rounds(
        routed(trace, setting, times),
        num_slots=setting.num_slots,
        num_bytes=lambda key: setting.record_bytes[key.layer],
        link=setting.link,
        options=setting.options,
        is_eager=setting.is_eager,
    )
    counters = result.counters
    asked = max(1, counters.hits + counters.late + counters.misses)
    return Outcome(
        tok_per_s=result.committed / result.seconds,
        bytes_per_tok=result.bytes_per_tok,
        hit_share=counters.hits / asked,
        late_share=counters.late / asked,
        miss_share=counters.misses / asked,
        wasted_share=counters.wasted_bytes / max(1, counters.link_bytes),
        stall_share=counters.stall_s / result.seconds,
    )


def routed(trace: RoutingTrace, setting: Setting, times: ComputeTimes | None = None) -> Trace:
    """The rounds that a setting cuts a trace into, and the prompt before them. As replay_setting takes and raises."""
    _require_rounds(trace)
    chosen, header = ComputeTimes.of(trace) if times is None else times, trace.header
    prompt = slots_at_first(header, setting.num_slots)
    return Trace(header.num_layers, header.num_experts, rounds_of(trace, setting.k, chosen), prompt)


def slots_at_first(header: TraceHeader, num_slots: int) -> list[list[int]]:
    """[L]: the experts that the recorded prompt left in the slots, and others where there is more room."""
    known = [set(experts) for experts in header.resident]
    others = [
        (layer, expert)
        for expert in range(header.num_experts)
        for layer in range(header.num_layers)
        if expert not in known[layer]
    ]
    experts = [list(one) for one in header.resident]
    for layer, expert in others[: max(0, num_slots - sum(map(len, known)))]:
        experts[layer].append(expert)
    return experts


def error_share(recorded: Outcome, replayed: Outcome) -> float:
    """How far the replay is off, of the tokens per second that were measured."""
    return replayed.tok_per_s / recorded.tok_per_s - 1.0


def _require_rounds(trace: RoutingTrace) -> Sequence[TraceRound]:
    if not trace.rounds:
        raise TraceError("The trace holds no round: the recorded run ended with its first token; record a longer one.")
    return trace.rounds
