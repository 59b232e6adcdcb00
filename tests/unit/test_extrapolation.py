"""What a replay takes on trust is said, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

from moespeq.replay import RoutingTrace
from moespeq.replay.extrapolation import extrapolations
from moespeq.replay.what_if import Setting, recorded_setting
from synthetic_trace import synthetic_trace


def recorded(rounds_k: int) -> RoutingTrace:
    return synthetic_trace(num_positions=80, acceptance=0.8, rounds_k=rounds_k, skew=1.0)


def at(trace: RoutingTrace, k: int | None) -> Setting:
    return replace(recorded_setting(trace), k=k)


def test_recorded_settings_and_what_routes_alone_decide_take_nothing_on_trust() -> None:
    trace = recorded(8)
    own = at(trace, None)
    assert extrapolations(trace, own) == []
    more = replace(own, k=8, num_slots=30, link=replace(own.link, bytes_per_s=1e9))
    assert extrapolations(trace, more) == []


def test_a_deeper_draft_trusts_the_draft_along_the_text() -> None:
    assert any("Behind draft step 2" in said for said in extrapolations(recorded(2), at(recorded(2), 16)))
    assert not any("Behind" in said for said in extrapolations(recorded(16), at(recorded(16), 2)))


def test_more_rows_than_recorded_are_taken_for_as_fast() -> None:
    trace = recorded(16)
    assert not any("rows" in said for said in extrapolations(trace, at(trace, 32)))
    assert any("A pass of 34 rows" in said for said in extrapolations(trace, at(trace, 33)))


def test_experts_outside_of_what_was_timed_are_named() -> None:
    trace = recorded(16)
    timed = [count for one in trace.rounds for count in one.layer_experts]
    (said,) = extrapolations(trace, at(trace, 0))
    assert said == f"A layer asks for 2.0 experts, and times were measured from {min(timed)} to {max(timed)}."


def test_a_run_without_drafts_trusts_two_things() -> None:
    trace = recorded(0)
    first, second = extrapolations(trace, at(trace, 4))
    assert first.startswith("No recorded round drafted")
    assert "always asked for 2: half of its time" in second
    assert extrapolations(trace, at(trace, 0)) == []


def test_other_records_are_computed_as_fast_as_the_recorded_ones() -> None:
    trace = recorded(4)
    plain = replace(at(trace, None), record_bytes=[trace.header.plain_record_bytes] * 4)
    assert len(extrapolations(trace, plain)) == 1
