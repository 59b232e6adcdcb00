"""Whether a trace's fields can be what a run recorded: files come from anywhere, and a replay trusts every number.

Shapes: L MoE layers, K experts a token, E experts a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moespeq.replay.routing_trace import RoutingTrace, TraceHeader, TracePosition, TraceRound

__all__ = ["find_fault"]

_MOST = 1 << 62  # of any number: sums stay numbers
_MOST_RECORDS = 1 << 20  # layers times experts; the largest models have 16 thousand
_MOST_ROWS, _MOST_THREADS, _MOST_DEPTH = 65, 64, 1 << 20
_OPTIONS = {"rows": _MOST_ROWS, "link_threads": _MOST_THREADS, "link_depth": _MOST_DEPTH}


def find_fault(trace: RoutingTrace) -> str | None:
    """What of `trace` cannot be, such as "round 3: committed", or None."""
    return next(_faults(trace), None)


def _faults(trace: RoutingTrace) -> Iterator[str]:
    header = trace.header
    yield from (f"header: {name}" for name in _of_header(header))
    for number, position in enumerate(trace.positions):
        yield from (f"token {number}: {name}" for name in _of_position(position, header))
    for number, recorded in enumerate(trace.rounds):
        yield from (f"round {number}: {name}" for name in _of_round(recorded, header))
    if trace.rounds and sum(one.committed for one in trace.rounds) != len(trace.positions) - 1:
        yield "tokens and rounds do not add up"
    if trace.rounds and not any(one.verify_s > one.stall_s for one in trace.rounds):
        yield "rounds that only wait"
    if trace.rounds and not any(one.hits + one.late + one.misses for one in trace.rounds):
        yield "rounds that ask for no expert"


def _of_header(header: TraceHeader) -> Iterator[str]:
    least = {"num_layers": 1, "num_experts": 1, "top_k": 1, "plain_record_bytes": 1, "base_bytes": 0, "num_slots": 1}
    yield from (name for name, low in (least | {"prompt_tok": 0}).items() if not _is_count(getattr(header, name), low))
    if header.num_layers * header.num_experts > _MOST_RECORDS or header.top_k > header.num_experts:
        yield "num_experts"
    if (
        not isinstance(header.record_bytes, list)
        or len(header.record_bytes) != header.num_layers
        or not all(_is_count(size, 1) for size in header.record_bytes)
    ):
        yield "record_bytes"
    if not _are_resident(header.resident, header):
        yield "resident"
    yield from (
        name for name in ("model", "model_type", "layout", "device") if not isinstance(getattr(header, name), str)
    )
    yield from (name for name in ("link_bytes_per_s", "draft_step_s") if not _is_number(getattr(header, name)))
    if not isinstance(header.options, dict):
        yield "options"
        return
    if header.options.get("lookahead_tok") is not None and not _is_count(header.options["lookahead_tok"], 1):
        yield "options, lookahead_tok"
    for name, most in _OPTIONS.items():
        if name in header.options and not _is_count(header.options[name], 1, most):
            yield f"options, {name}"


def _of_position(position: TracePosition, header: TraceHeader) -> Iterator[str]:
    yield from (name for name in ("token", "step", "drafted") if not _is_count(getattr(position, name), 0))
    if not _is_number(position.confidence, 1.0):
        yield "confidence"
    if not isinstance(position.accepted, bool):
        yield "accepted"
    for name in ("true", "draft", "ahead"):
        routes = getattr(position, name)
        if (
            not isinstance(routes, list)
            or len(routes) != header.num_layers
            or not all(_is_route(one, header, may_be_empty=name == "ahead") for one in routes)
        ):
            yield name


def _of_round(recorded: TraceRound, header: TraceHeader) -> Iterator[str]:
    counts = ("k", "accepted", "hits", "late", "misses", "link_bytes", "used_bytes")
    yield from (name for name in counts if not _is_count(getattr(recorded, name), 0))
    seconds = ("draft_s", "verify_s", "stall_s", "link_busy_s")
    yield from (name for name in seconds if not _is_number(getattr(recorded, name)))
    if recorded.verify_s == 0:
        yield "verify_s"
    if recorded.k >= _MOST_ROWS or recorded.accepted > recorded.k:
        yield "k"
    if not _is_count(recorded.committed, 1, recorded.accepted + 1):
        yield "committed"
    if not _are_of_layers(recorded.layer_experts, lambda one: _is_count(one, 1, header.num_experts), header):
        yield "layer_experts"
    if not _are_of_layers(recorded.layer_s, _is_number, header):
        yield "layer_s"


def _are_of_layers(values: Any, is_one: Callable[[Any], bool], header: TraceHeader) -> bool:
    """[L - 1]"""
    return isinstance(values, list) and len(values) == header.num_layers - 1 and all(map(is_one, values))


def _are_resident(resident: Any, header: TraceHeader) -> bool:
    """[L]: distinct experts, together no more than slots."""
    if not isinstance(resident, list) or len(resident) != header.num_layers:
        return False
    for experts in resident:
        if not isinstance(experts, list) or not all(_is_count(one, 0, header.num_experts - 1) for one in experts):
            return False
    return sum(map(len, resident)) == sum(len(set(experts)) for experts in resident) <= header.num_slots


def _is_route(experts: Any, header: TraceHeader, *, may_be_empty: bool) -> bool:
    if not isinstance(experts, list) or not all(_is_count(one, 0, header.num_experts - 1) for one in experts):
        return False
    return len(set(experts)) == len(experts) and (len(experts) == header.top_k or (may_be_empty and not experts))


def _is_count(value: Any, least: int, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, most: float = _MOST) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
