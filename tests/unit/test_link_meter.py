"""Link utilisation: time, never counted twice."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from moespeq.decode.link_meter import LinkMeter, merge, overlap_s


@dataclass
class Move:
    begin_s: float
    end_s: float


def test_copies_that_overlap_count_their_time_once() -> None:
    assert merge([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([(0, 4)], [(1, 2), (3, 6)], 2),
        ([(0, 1), (2, 3), (5, 9)], [(0.5, 2.5), (6, 7)], 2),
        ([(0, 1)], [(1, 2)], 0),
        ([], [(0, 1)], 0),
    ],
)
def test_overlap_is_the_time_in_both(left: list, right: list, expected: float) -> None:
    assert overlap_s(left, right) == expected
    assert overlap_s(right, left) == expected


def test_a_measure_covers_what_happened_since_the_last_one() -> None:
    moves, stalls = [[Move(0, 2), Move(2, 3)], []], [[(1.0, 5.0)], []]
    meter = LinkMeter(lambda: moves.pop(0), lambda: stalls.pop(0))
    assert meter.measure() == (3, 2, [Move(0, 2), Move(2, 3)], [(1.0, 5.0)], [(0, 3)])
    assert meter.measure() == (0, 0, [], [], [])
