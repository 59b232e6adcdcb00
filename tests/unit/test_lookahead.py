"""The ELB sums up late what it was told early: the same numbers, whenever somebody asks."""

from __future__ import annotations

from moespeq.residency.lookahead import ExpertLookahead

NUM_LAYERS, NUM_EXPERTS = 3, 10
STEPS = [[[1, 2], [3, 4], [5, 6]], [[1, 3], [3, 5], [5, 7]], [[1, 4], [3, 6], [5, 8]]]


def lookahead_of(steps: list[list[list[int]]], *, window_tok: int | None = None) -> ExpertLookahead:
    lookahead = ExpertLookahead(NUM_LAYERS, NUM_EXPERTS, window_tok=window_tok)
    for routes in steps:
        lookahead.add(routes)
    return lookahead


def test_uses_add_up_whether_one_asks_after_each_step_or_at_the_end() -> None:
    at_the_end, after_each = lookahead_of(STEPS), lookahead_of([])
    for routes in STEPS:
        after_each.add(routes)
        assert all(after_each.has_use(10 + expert) for expert in routes[1])
    for lookahead in (at_the_end, after_each):
        assert lookahead.expected_uses(1) == {13: 3, 14: 1, 15: 1, 16: 1}


def test_a_step_is_read_when_its_layer_is_asked_about_and_not_before() -> None:
    lookahead = lookahead_of(STEPS)
    assert lookahead._uses == [{}, {}, {}]
    assert lookahead.has_use(25)
    assert lookahead._uses == [{}, {}, {25: 3, 26: 1, 27: 1, 28: 1}]


def test_steps_behind_the_window_are_counted_and_name_nothing() -> None:
    lookahead = lookahead_of(STEPS, window_tok=2)
    assert (lookahead.num_steps, lookahead.num_named) == (3, 2)
    assert lookahead.expected_uses(0) == {1: 2, 2: 1, 3: 1}


def test_only_what_later_steps_name_is_listed_once() -> None:
    lookahead = lookahead_of(STEPS)
    assert list(lookahead.named_since(1, 0)) == [1, 3, 4]
    assert list(lookahead.named_since(0, 0)) == [1, 2, 3, 4]
    lookahead.retire(0)
    assert list(lookahead.named_since(1, 0)) == []


def test_layers_that_are_passed_over_lose_their_uses_too() -> None:
    lookahead = lookahead_of(STEPS[:1])
    assert lookahead.retire(1) == {1: 1, 2: 1, 13: 1, 14: 1}
    assert not lookahead.has_use(13)
    assert lookahead.has_use(25)
    lookahead.add(STEPS[1])
    assert (lookahead.expected_uses(1), lookahead.expected_uses(2)) == ({}, {25: 2, 26: 1, 27: 1})


def test_a_dropped_record_is_expected_no_longer() -> None:
    lookahead = lookahead_of(STEPS)
    lookahead.drop(13)
    lookahead.drop(19)
    assert lookahead.expected_uses(1) == {14: 1, 15: 1, 16: 1}


def test_a_round_that_is_over_leaves_nothing() -> None:
    lookahead = lookahead_of(STEPS)
    lookahead.retire(0)
    lookahead.clear()
    assert (lookahead.front, lookahead.num_steps, lookahead.num_named) == (0, 0, 0)
    assert [dict(lookahead.expected_uses(layer)) for layer in range(NUM_LAYERS)] == [{}, {}, {}]
