"""Reads a recorded run, the JSON of `moespeq run --json` or a trace of `moespeq trace record`, as signals.

A file comes from anywhere: every figure is checked for being one, and what is no run is refused with a sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moespeq.doctor.signals import Acceptance, Kept, RouteCounts, Signals, name_for_commands
from moespeq.errors import UsageError
from moespeq.replay import RoutingTrace
from moespeq.replay.route_match import Match, match_of

__all__ = ["read_run", "signals_of_run", "signals_of_trace"]

_GZIP = b"\x1f\x8b"
_COUNTS = ("rounds", "hits", "late", "misses", "link_bytes", "wasted_bytes")
_SECONDS = ("ttft_s", "decode_s", "draft_s", "stall_s", "link_busy_s")
_MOST = 1 << 62  # of any figure: sums stay numbers
_ROUTES = ("exact", "same_set", "wrong")


def read_run(path: Path, model: str | None = None) -> Signals:
    """What the run in the file `path` says; model: for commands, where the file does not name it.

    Raises UsageError, or TraceError for a damaged trace.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give --run a file.") from error
    if content.startswith(_GZIP):
        return signals_of_trace(RoutingTrace.read(path), model, path.name)
    try:
        return signals_of_run(json.loads(content), model, path.name)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no recorded run; give the output of `moespeq run --json`, or a trace of `moespeq trace record`."
        ) from error


def signals_of_run(values: Any, model: str | None, name: str) -> Signals:
    """Raises ValueError, TypeError or LookupError for what is no run's JSON."""
    counts = {field: _number(values[field], whole=True) for field in _COUNTS}
    seconds = {field: _number(values[field]) for field in _SECONDS}
    routes = {field: int(_number(values["routes"][field], whole=True)) for field in _ROUTES}
    drafted, accepted = ([int(_number(one, whole=True)) for one in values[f"{what}_per_round"]] for what in _PER_ROUND)
    if not len(drafted) == len(accepted) == counts["rounds"]:
        raise ValueError("rounds")
    half = len(drafted) // 2
    return Signals(
        source=name,
        model=model or "MODEL",
        rounds=len(drafted),
        plain_rounds=drafted.count(0),
        acceptance=Acceptance.of(drafted, accepted),
        before=Acceptance.of(drafted[:half], accepted[:half]),
        recent=Acceptance.of(drafted[half:], accepted[half:]),
        hits=int(counts["hits"]),
        late=int(counts["late"]),
        misses=int(counts["misses"]),
        link_bytes=int(counts["link_bytes"]),
        wasted_bytes=int(counts["wasted_bytes"]),
        pass_s=seconds["ttft_s"] + seconds["decode_s"],
        draft_s=seconds["draft_s"],
        stall_s=seconds["stall_s"],
        link_busy_s=seconds["link_busy_s"],
        routes=RouteCounts(sum(routes.values()), routes["wrong"]),
        device=str(values.get("device", "cpu")),
        k_asked="auto" if any(drafted) else 0,  # a governor tries drafts in its first rounds
    )


_PER_ROUND = ("k", "accepted")


def _number(value: Any, *, whole: bool = False) -> float:
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r} is no figure of a run")
    return value  # type: ignore[no-any-return]  # an int or a float, as checked


def signals_of_trace(trace: RoutingTrace, model: str | None, name: str) -> Signals:
    """The rounds of a trace, and what its windows along the finished text say."""
    header, rounds = trace.header, trace.rounds
    drafted, accepted = [one.k for one in rounds], [one.accepted for one in rounds]
    half = len(rounds) // 2
    record_bytes = sum(header.record_bytes) / len(header.record_bytes)
    link_bytes = sum(one.link_bytes for one in rounds)
    unused_bytes = link_bytes - sum(one.used_bytes for one in rounds) - int(header.num_slots * record_bytes)
    pairs = [(p.draft[layer], p.true[layer]) for p in trace.positions for layer in range(header.num_layers)]
    return Signals(
        source=name,
        model=model or name_for_commands(header.model),
        rounds=len(rounds),
        plain_rounds=drafted.count(0),
        acceptance=Acceptance.of(drafted, accepted),
        before=Acceptance.of(drafted[:half], accepted[:half]),
        recent=Acceptance.of(drafted[half:], accepted[half:]),
        hits=sum(one.hits for one in rounds),
        late=sum(one.late for one in rounds),
        misses=sum(one.misses for one in rounds),
        link_bytes=link_bytes,
        wasted_bytes=max(0, unused_bytes),  # at least: what a full set of slots may still hold is not counted
        pass_s=sum(one.draft_s + one.verify_s for one in rounds),
        draft_s=sum(one.draft_s for one in rounds),
        stall_s=sum(one.stall_s for one in rounds),
        link_busy_s=sum(one.link_busy_s for one in rounds),
        routes=RouteCounts(len(pairs), sum(match_of(*pair) is Match.WRONG for pair in pairs)),
        kept_in_rounds=_kept_in_rounds(trace),
        kept_on_text=_kept_on_text(trace),
        record_bytes=record_bytes,
        device=header.device,
        k_asked=header.options.get("k"),
        lookahead_tok=header.options.get("lookahead_tok"),
    )


def _kept_in_rounds(trace: RoutingTrace) -> Kept:
    """A round that a stop or limit cut rejected none."""
    kept = sum(one.accepted for one in trace.rounds)
    rejected = sum(one.committed == one.accepted + 1 and one.accepted < one.k for one in trace.rounds)
    return Kept(kept, kept + rejected)


def _kept_on_text(trace: RoutingTrace) -> Kept:
    return Kept(sum(one.accepted for one in trace.positions), len(trace.positions))
