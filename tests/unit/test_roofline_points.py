"""The roofline of a recorded run: its depths replayed, its rounds as measured, and a picture of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moespeq.errors import TraceError
from moespeq.figures.roofline import draw_roofline
from moespeq.replay import RoutingTrace
from moespeq.replay.roofline_points import Roofline, roofline_points
from synthetic_trace import LINK_BYTES_PER_S, RECORD_BYTES, synthetic_trace


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return synthetic_trace(num_positions=160, acceptance=0.95, rounds_k=[0, 4, 16], stickiness=0.3)


@pytest.fixture(scope="module")
def found(trace: RoutingTrace) -> Roofline:
    return roofline_points(trace)


def test_every_depth_the_rows_allow_is_replayed_at_powers_of_two(found: Roofline) -> None:
    assert [point.k for point in found.points] == [0, 1, 2, 4, 8, 16, 32]


def test_no_replayed_depth_lies_above_a_roof(found: Roofline) -> None:
    for point in found.points:
        assert point.tokens_per_s <= point.intensity * found.io_roof * (1 + 1e-9)
        assert point.tokens_per_s <= found.compute_roof


def test_the_io_roof_is_the_links_rate_in_tokens(found: Roofline, trace: RoutingTrace) -> None:
    assert found.tok_bytes == trace.header.top_k * trace.header.num_layers * RECORD_BYTES
    assert found.io_roof == LINK_BYTES_PER_S / found.tok_bytes


def test_recorded_rounds_are_shown_by_depth(found: Roofline, trace: RoutingTrace) -> None:
    assert [point.k for point in found.measured] == [0, 4, 16]
    plain = [one for one in trace.rounds if one.k == 0]
    assert found.measured[0].tokens_per_s == pytest.approx(len(plain) / sum(one.verify_s for one in plain))
    assert sum(point.num_rounds for point in found.measured) == len(trace.rounds)


def test_the_chosen_depth_is_the_fastest_replayed_one(found: Roofline) -> None:
    fastest = max(found.points, key=lambda point: point.tokens_per_s)
    assert found.best_k == fastest.k
    assert found.paper_k > 0, "the paper counts nothing for a round without a draft"


def test_a_run_that_never_drafted_is_asked_for_every_depth_too() -> None:
    found = roofline_points(synthetic_trace(num_positions=40, rounds_k=0))
    assert [point.k for point in found.points] == [0, 1, 2, 4, 8, 16, 32]
    assert [point.k for point in found.measured] == [0]


def test_a_trace_without_rounds_is_refused(trace: RoutingTrace) -> None:
    with pytest.raises(TraceError, match="record a longer one"):
        roofline_points(replace(trace, rounds=[]))


@pytest.mark.parametrize("rounds_k", [0, 8, [0, 4]])
def test_equal_traces_give_equal_pictures(rounds_k: int | list[int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded = synthetic_trace(num_positions=40, rounds_k=rounds_k, acceptance=0.9)
    for name in ("first.svg", "second.svg"):
        draw_roofline(recorded, tmp_path / name)
    first = (tmp_path / "first.svg").read_bytes()
    assert first == (tmp_path / "second.svg").read_bytes()
    assert b"</svg>" in first


def test_a_link_that_nothing_crossed_has_no_roof(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = synthetic_trace(num_positions=40, rounds_k=4, num_slots=64)
    idle = replace(trace, header=replace(trace.header, link_bytes_per_s=0.0))
    assert roofline_points(idle).io_roof == 0.0
    draw_roofline(idle, tmp_path / "idle.svg")
