"""Labels lie beside their points and on nothing else."""

from __future__ import annotations

import itertools
import random

import pytest

from moespeq.figures.labels import Box, Label, free_places, write_labels

FRAME = Box(0, 0, 200, 100)


def test_boxes_that_share_an_edge_do_not_meet() -> None:
    assert Box(0, 0, 2, 2).meets(Box(1, 1, 3, 3))
    assert not Box(0, 0, 2, 2).meets(Box(2, 0, 4, 2))
    assert not Box(0, 0, 2, 2).meets(Box(0, 2, 2, 4))


def test_a_lonely_label_stands_above_its_point() -> None:
    (place,) = free_places([(100, 50, 20, 8)], FRAME, [])
    assert place is not None
    assert (place.left + place.right) / 2 == 100
    assert place.bottom > 50


def test_at_the_upper_edge_it_stands_below() -> None:
    (place,) = free_places([(100, 98, 20, 8)], FRAME, [])
    assert place is not None
    assert place.top < 98


def test_no_label_meets_another_or_what_is_taken_or_the_frame() -> None:
    rng = random.Random(0)
    points = [(rng.uniform(0, 200), rng.uniform(0, 100)) for _ in range(25)]
    taken = [Box(x - 2, y - 2, x + 2, y + 2) for x, y in points]
    places = [place for place in free_places([(x, y, 24, 8) for x, y in points], FRAME, taken) if place]
    assert len(places) > 10
    assert not any(left.meets(right) for left, right in itertools.combinations(places, 2))
    assert not any(place.meets(mark) for place in places for mark in taken)
    assert all(place.left >= 0 and place.right <= 200 and place.bottom >= 0 and place.top <= 100 for place in places)


def test_the_first_label_gets_its_place_and_one_without_any_is_left_out() -> None:
    places = free_places([(100, 50, 150, 40)] * 3, FRAME, [])
    assert [place is not None for place in places] == [True, True, False]


def test_labels_are_written_where_there_is_room_and_keep_off_lines() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(4, 3))
    panel = figure.subplots()
    panel.set(xlim=(0, 10), ylim=(0, 10))
    write_labels(panel, [Label("above", 5, 5)], [[(4, 5.8), (6, 5.8)]])
    (written,) = panel.texts
    assert written.get_text() == "above"
    assert written.xyann[1] < 0, "a line lies above the point, so it stands below"
