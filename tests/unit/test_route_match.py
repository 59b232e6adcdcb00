"""Exact, the same set, or wrong: one definition for every count of routes."""

from __future__ import annotations

import itertools

import pytest

from moespeq.decode.statistics import RouteFidelity
from moespeq.replay.route_match import Match, RouteMatch, match_of, weighted_mean


@pytest.mark.parametrize(
    ("predicted", "match"),
    [
        ([1, 2], Match.EXACT),
        ((1, 2), Match.EXACT),
        ([2, 1], Match.SAME_SET),
        ([1, 3], Match.WRONG),
        ([1], Match.WRONG),
        ([1, 2, 3], Match.WRONG),
        ([], Match.WRONG),
    ],
)
def test_order_tells_exact_from_the_same_set_and_one_other_expert_is_wrong(predicted: list[int], match: Match) -> None:
    assert match_of(predicted, [1, 2]) is match


def test_live_counters_and_studies_agree_on_every_pair() -> None:
    routes = [list(one) for one in itertools.permutations(range(4), 2)]
    pairs = list(itertools.product(routes, routes))
    live = RouteFidelity()
    for predicted, true in pairs:
        live.compare([[predicted]], [[true]], 1)
    study = RouteMatch.of(pairs)
    counted = [study.exact, study.same_set, study.wrong]
    assert [round(share * len(pairs)) for share in counted] == list(live.to_json().values())


def test_a_pair_without_a_prediction_does_not_count() -> None:
    assert RouteMatch.of([([], [1, 2]), ([2, 1], [1, 2])]) == RouteMatch(0.0, 1.0, 0.0, 1.0, 1)
    assert RouteMatch.of([]) == RouteMatch(0.0, 0.0, 0.0, 0.0, 0)


def test_overlap_is_the_share_of_true_experts_that_were_named() -> None:
    assert RouteMatch.of([([1, 9, 8, 2], [1, 2, 3, 4])]).overlap == 0.5


def test_parts_weigh_as_many_routes_as_they_hold() -> None:
    left, right = RouteMatch(1.0, 0.0, 0.0, 1.0, 1), RouteMatch(0.0, 0.0, 1.0, 0.5, 3)
    assert RouteMatch.together([left, right]) == RouteMatch(0.25, 0.0, 0.75, 0.625, 4)
    assert weighted_mean([], []) == 0.0
