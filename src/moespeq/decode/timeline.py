"""When the parts of rounds happened, and the same as a file that trace viewers open (Chrome's, Perfetto).

Times are the host's: a draft step ends when its routes are known, a layer begins when the target's are. What a GPU does
between may lie a little earlier. Copies and waits are the link's own spans.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moespeq.decode.link_meter import LinkUse
from moespeq.errors import TraceError
from moespeq.ports import Clock
from moespeq.transfer.moves import Move
from moespeq.whole_file import write_whole

__all__ = ["RoundTimes", "write_timeline"]


@dataclass(slots=True)
class RoundTimes:
    """One round on the engine's clock, in seconds. steps_s: ends of the draft's steps; layers_s: of each MoE layer,
    when its routes were known; experts: how many distinct ones each asked for; link: what
    ended on it in the round.
    """

    clock: Clock
    begin_s: float
    end_s: float = 0.0
    k: int = 0
    accepted: int = 0
    steps_s: list[float] = field(default_factory=list)
    layers_s: list[float] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    link: LinkUse = field(default_factory=lambda: LinkUse(0.0, 0.0))

    def note_step(self) -> None:
        """A draft step's routes are known."""
        self.steps_s.append(self.clock.now_s())

    def note_layer(self, routes: Sequence[Sequence[int]]) -> None:
        """A verified layer's routes are known, [row][K]."""
        self.layers_s.append(self.clock.now_s())
        self.experts.append(len(set().union(*routes)))


_LANES = ("round", "draft", "verify", "waiting for the link", "link")


def write_timeline(rounds: Sequence[RoundTimes], path: Path) -> None:
    """Write `rounds` whole or not at all, as Chrome trace events, times from the first round on. Raises TraceError."""
    origin_s = rounds[0].begin_s if rounds else 0.0
    events = [event for number, times in enumerate(rounds) for event in _of_round(number, times, origin_s)]
    copies = _in_lanes([move for times in rounds for move in times.link.moves])
    for lane, move in copies:
        events.append(
            _event(len(_LANES) - 1 + lane, "record", move.begin_s, move.end_s, origin_s, bytes=move.num_bytes)
        )
    lanes = [*_LANES, *(f"link, copy {lane + 1} at once" for lane in range(1, 1 + max(copies, default=(0,))[0]))]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(lanes)
    ]
    try:
        write_whole(path, json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))
    except OSError as error:
        raise TraceError(f"{path} cannot be written ({error.strerror}); choose another file.") from error


def _of_round(number: int, times: RoundTimes, origin_s: float) -> Iterator[dict[str, Any]]:
    """All but its copies."""

    def event(lane: str, name: str, begin_s: float, end_s: float, **args: object) -> dict[str, Any]:
        return _event(_LANES.index(lane), name, begin_s, end_s, origin_s, **args)

    yield event("round", f"round {number}", times.begin_s, times.end_s, k=times.k, accepted=times.accepted)
    for step, (begin_s, end_s) in enumerate(pairwise([times.begin_s, *times.steps_s])):
        yield event("draft", f"step {step}", begin_s, end_s)
    for layer, (begin_s, end_s) in enumerate(pairwise([*times.layers_s, times.end_s])):
        yield event("verify", f"layer {layer}", begin_s, end_s, experts=times.experts[layer])
    for begin_s, end_s in times.link.stalls:
        yield event("waiting for the link", "stall", begin_s, end_s)


def _event(lane: int, name: str, begin_s: float, end_s: float, origin_s: float, **args: object) -> dict[str, Any]:
    begin_us, end_us = 1e6 * (begin_s - origin_s), 1e6 * (end_s - origin_s)
    place = {"pid": 0, "tid": lane, "ts": round(begin_us, 1), "dur": round(end_us - begin_us, 1)}
    return {"name": name, "ph": "X", **place, "args": args}


def _in_lanes(moves: Sequence[Move]) -> list[tuple[int, Move]]:
    """Each copy in the first lane that is free when it begins: a viewer shows no two spans of a lane at once."""
    placed: list[tuple[int, Move]] = []
    free_at_s: list[float] = []
    for move in sorted(moves):
        lane = next((lane for lane, end_s in enumerate(free_at_s) if end_s <= move.begin_s), len(free_at_s))
        free_at_s[lane : lane + 1] = [move.end_s]
        placed.append((lane, move))
    return placed
