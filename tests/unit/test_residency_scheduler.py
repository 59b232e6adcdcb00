"""Plans: the most valuable predicted record while drafting, layer order while verifying, nothing twice."""

from __future__ import annotations

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.scheduler import Intent, draft_phase, plan_prefetch, plan_stage
from moespeq.types import Cause, ExpertKey


def lookahead(*predictions: tuple[int, int, float]) -> ExpertLookahead:
    elb = ExpertLookahead(4)
    for layer, expert, confidence in predictions:
        elb.add(0, layer, [(expert, confidence)])
    return elb


def prefetch_order(elb: ExpertLookahead, cached: set[ExpertKey], limit: int = 9) -> list[ExpertKey]:
    def num_bytes(key: ExpertKey) -> int:
        return 10 if key.expert < 5 else 30

    plan = plan_prefetch(elb, cached, cause=Cause.PREFETCH, num_bytes=num_bytes, limit=limit)
    assert all(intent.cause is Cause.PREFETCH for intent in plan)
    return [intent.key for intent in plan]


def stage_order(elb: ExpertLookahead, cached: set[ExpertKey], limit: int = 9) -> list[ExpertKey]:
    plan = plan_stage(elb, cached, frequency=UseFrequency().score, limit=limit)
    assert all(intent.cause is Cause.STAGE for intent in plan)
    return [intent.key for intent in plan]


def test_confidence_of_several_steps_adds_up() -> None:
    elb = lookahead((2, 1, 0.5), (0, 0, 0.9), (2, 1, 0.5))
    assert prefetch_order(elb, set()) == [(2, 1), (0, 0)]


def test_prefetch_weighs_uses_by_bytes() -> None:
    assert prefetch_order(lookahead((0, 7, 1.0), (3, 1, 0.5)), set()) == [(3, 1), (0, 7)]


def test_equal_value_is_fetched_in_layer_order() -> None:
    assert prefetch_order(lookahead((2, 0, 1.0), (1, 3, 1.0), (1, 2, 1.0)), set()) == [(1, 2), (1, 3), (2, 0)]


def test_what_is_cached_is_not_planned() -> None:
    elb = lookahead((0, 0, 1.0), (1, 0, 1.0))
    assert prefetch_order(elb, {ExpertKey(0, 0)}) == [(1, 0)]
    assert stage_order(elb, {ExpertKey(0, 0)}) == [(1, 0)]


def test_plans_keep_to_their_limit() -> None:
    elb = lookahead(*((layer, expert, 1.0) for layer in range(4) for expert in range(4)))
    assert prefetch_order(elb, set(), limit=3) == [(0, 0), (0, 1), (0, 2)]
    assert stage_order(elb, set(), limit=5) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_stage_goes_by_layer_whatever_the_value() -> None:
    assert stage_order(lookahead((1, 0, 9.0), (0, 0, 0.1), (0, 1, 0.2)), set()) == [(0, 1), (0, 0), (1, 0)]


def test_stage_breaks_ties_inside_a_layer_by_frequency() -> None:
    frequency = UseFrequency()
    frequency.touch(ExpertKey(1, 2))
    elb = ExpertLookahead(2)
    elb.expect_all(3)
    elb.retire(0)
    plan = plan_stage(elb, set(), frequency=frequency.score, limit=2)
    assert plan == [Intent(ExpertKey(1, 2), Cause.STAGE), Intent(ExpertKey(1, 0), Cause.STAGE)]


def test_layers_behind_the_front_are_never_planned() -> None:
    elb = lookahead((0, 0, 1.0), (1, 0, 1.0), (2, 0, 1.0))
    assert elb.retire(1) == [(0, 0), (1, 0)]
    elb.add(1, 0, [(5, 1.0)])
    assert stage_order(elb, set()) == [(2, 0)]
    assert elb.clear() == [(2, 0)]
    assert (elb.front, elb.num_steps, list(elb.ahead())) == (0, 0, [])


def test_a_draft_primes_then_prefetches_then_saturates() -> None:
    phases = [draft_phase(steps_done=done, num_steps=10) for done in range(11)]
    assert phases == [Cause.PRIME] * 3 + [Cause.PREFETCH] * 7 + [Cause.SATURATE]
    assert draft_phase(steps_done=0, num_steps=0) is Cause.SATURATE
