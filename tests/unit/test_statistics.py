"""What is reported is the plain sum of what rounds measured; prefill adds bytes and experts, and no round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moespeq.decode.statistics import GenerationStats, RouteFidelity, summarize
from moespeq.types import Cause, StepReport


def report(k: int = 0, accepted: int = 0, committed: int = 1, **measured: Any) -> StepReport:
    values: dict[str, Any] = dict.fromkeys(("hits", "late", "misses"), 0)
    values |= dict.fromkeys(("draft_s", "verify_s", "stall_s"), 0.0)
    return StepReport(k=k, accepted=accepted, committed=committed, **(values | measured))


def summed(*reports: StepReport, prefill: StepReport | None = None, decode_s: float = 2.0) -> GenerationStats:
    return summarize(
        reports,
        prefill or report(),
        wasted_bytes=7,
        rows=17,
        seed=5,
        prompt_tok=3,
        reused_tok=0,
        ttft_s=0.5,
        decode_s=decode_s,
        routes=RouteFidelity(),
    )


def test_tokens_are_summed_over_rounds_only() -> None:
    stats = summed(report(4, 3, 4), report(0, 0, 1), report(2, 2, 2), prefill=report(committed=1))
    assert (stats.rounds, stats.drafted, stats.accepted, stats.committed) == (3, 6, 5, 7)
    assert stats.k_per_round == (4, 0, 2)
    assert stats.accepted_per_round == (3, 0, 2)
    assert stats.committed_per_round == pytest.approx(7 / 3)
    assert stats.acceptance == pytest.approx(5 / 6)
    assert stats.tokens_per_s == pytest.approx(3.5)


def test_bytes_experts_and_stalls_include_the_prefill() -> None:
    first = report(hits=1, late=2, misses=3, stall_s=0.5, bytes_by_cause={Cause.DEMAND: 10, Cause.STAGE: 5})
    later = report(4, hits=10, late=20, misses=30, stall_s=0.25, bytes_by_cause={Cause.DEMAND: 1, Cause.PRIME: 2})
    stats = summed(later, prefill=first)
    assert (stats.hits, stats.late, stats.misses, stats.stall_s) == (11, 22, 33, 0.75)
    assert stats.link_bytes == 18
    assert stats.bytes_by_cause == {"demand": 11, "stage": 5, "prime": 2}


def test_times_of_draft_and_verify_are_those_of_rounds() -> None:
    stats = summed(report(1, draft_s=1.0, verify_s=2.0), report(1, draft_s=0.5, verify_s=0.25))
    assert (stats.draft_s, stats.verify_s) == (1.5, 2.25)


def test_a_generation_that_ends_with_its_first_token_divides_by_nothing() -> None:
    stats = summed(decode_s=0.0)
    assert (stats.rounds, stats.committed_per_round, stats.acceptance, stats.tokens_per_s) == (0, 0.0, None, 0.0)
    assert stats.bytes_by_cause == {}


def test_plain_decoding_has_no_share_accepted_because_nothing_was_drafted() -> None:
    stats = summed(report(), report())
    assert stats.to_json()["acceptance"] is None
    assert (stats.drafted, stats.acceptance, stats.committed_per_round) == (0, None, 1.0)


def test_the_json_form_has_every_figure_and_is_json() -> None:
    stats = summed(report(4, 3, 4, bytes_by_cause={Cause.SATURATE: 9}))
    value = json.loads(json.dumps(stats.to_json()))
    assert value["link_bytes_by_cause"] == {"saturate": 9}
    assert value["routes"] == {"exact": 0, "same_set": 0, "wrong": 0}
    assert value["k_per_round"] == [4]
    own = {
        "prompt_tok": "prompt_tokens",
        "reused_tok": "reused_tokens",
        "bytes_by_cause": "link_bytes_by_cause",
    }
    ratios = {"acceptance", "committed_per_round", "tokens_per_s", "stall_link_utilisation"}
    arrays = {"k_per_round", "accepted_per_round"}  # of the rounds' reports
    fields = {own.get(name, name) for name in GenerationStats.__slots__} - {"prefill", "reports", "stall_busy_s"}
    assert fields | ratios | arrays == set(value)


def test_waiting_for_a_busy_link_is_told_from_waiting_for_nothing() -> None:
    stats = summed(report(stall_s=3.0, stall_busy_s=2.0, link_busy_s=4.0), report(stall_s=1.0, stall_busy_s=1.0))
    assert stats.stall_link_utilisation == 0.75
    assert stats.link_busy_s == 4.0
    assert summed(report()).stall_link_utilisation == 0.0


def test_routes_are_exact_the_same_set_or_wrong() -> None:
    fidelity = RouteFidelity()
    draft = [[[1, 2], [1, 2]], [[3, 4], [9, 8]], [[5, 6], [5, 6]]]  # [step][layer]
    target = [[[1, 2], [4, 3], [5, 7]], [[1, 2], [9, 8], [6, 5]]]  # [layer][row]
    fidelity.compare(draft, target, 3)
    assert fidelity.to_json() == {"exact": 3, "same_set": 2, "wrong": 1}


def test_routes_of_rejected_rows_are_not_compared() -> None:
    """Behind a rejected token the draft saw another text than the target."""
    fidelity = RouteFidelity()
    fidelity.compare([[[1, 2]], [[3, 4]]], [[[1, 2], [7, 8]]], 1)
    assert fidelity.to_json() == {"exact": 1, "same_set": 0, "wrong": 0}


def test_fidelity_adds_up_over_rounds() -> None:
    fidelity = RouteFidelity()
    for _ in range(3):
        fidelity.compare([[[1, 2]]], [[[2, 1]]], 1)
    assert fidelity.same_set == 3
