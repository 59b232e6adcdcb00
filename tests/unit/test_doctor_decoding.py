"""Each check of drafts, link, memory and queue fires on figures that are wrong, and is silent on those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from doctor_facts import GIB, accepted, by_check, self_test_of, signals_of
from moespeq.doctor import Finding, Severity
from moespeq.doctor.base_probe import BaseFacts
from moespeq.doctor.decoding_checks import check_decoding
from moespeq.doctor.self_test_checks import check_self_test
from moespeq.doctor.signals import Acceptance, Kept, QueueState, RouteCounts
from moespeq.doctor.traffic_checks import check_traffic

WARNING, PROBLEM, FINE, SKIPPED = Severity.WARNING, Severity.PROBLEM, Severity.FINE, Severity.SKIPPED
PROFILE_BYTES_PER_S = 30e9


def found(**changes: Any) -> dict[str, Finding]:
    signals = signals_of(**changes)
    return by_check([*check_decoding(signals), *check_traffic(signals, PROFILE_BYTES_PER_S)])


def test_a_healthy_run_has_nothing_but_ok() -> None:
    assert {one.check: one.severity for one in found().values() if one.severity is not FINE} == {}


@pytest.mark.parametrize(
    ("check", "changes", "severity", "evidence", "remedy"),
    [
        ("acceptance", {"acceptance": accepted(0.5)}, WARNING, "50% of 100 drafts", "moespeq doctor org/name"),
        ("KV consistency", {"echo_logprob_gap": 2.0}, PROBLEM, "within 2.000", "--k 0"),
        ("KV consistency", {"kept_in_rounds": Kept(60, 100)}, PROBLEM, "60% of drafted tokens", "--k 0"),
        ("base calibration", {"routes": RouteCounts(100, 40)}, WARNING, "40.0% of 100", "moespeq prepare"),
        ("workload shift", {"recent": accepted(0.6)}, WARNING, "60% of 100", "moespeq trace record org/name"),
        (
            "speculation pays",
            {"plain_rounds": 80, "acceptance": accepted(0.3)},
            WARNING,
            "80% of 100 rounds",
            "moespeq plan org/name",
        ),
        ("link use", {"stall_s": 4.0}, WARNING, "40% of their time", "next checks"),
        ("link use", {"stall_s": 4.0, "link_busy_s": 9.0}, WARNING, "90% of it", "--device-memory"),
        ("lookahead window", {"misses": 500}, WARNING, "500 misses", "moespeq doctor org/name"),
        ("lookahead window", {"misses": 500, "lookahead_tok": 2}, WARNING, "2 steps", "leave --lookahead out"),
        ("copy sizes", {"record_bytes": 50e3}, WARNING, "48.83 KiB", "moespeq plan org/name"),
        ("link rate", {"link_busy_s": 50.0}, WARNING, "30 by the profile", "--host-memory"),
        ("link rate", {"link_busy_s": 50.0, "device": "cpu"}, WARNING, "30 by the profile", "--link-bandwidth"),
        ("wasted bytes", {"wasted_bytes": 50 * GIB}, WARNING, "(50%)", "--lookahead"),
        ("out of memory", {"failures": {"out_of_memory": 3}}, PROBLEM, "3 requests", "--bits 3"),
        ("queue", {"queue": QueueState(20, 1, 1.0)}, WARNING, "20 waiting", "--max-waiting"),
        ("queue", {"queue": QueueState(4, 1, 30.0)}, WARNING, "4 waiting", "--max-waiting"),
    ],
)
def test_what_is_wrong_is_told_with_evidence_cause_and_command(
    check: str, changes: dict[str, Any], severity: Severity, evidence: str, remedy: str
) -> None:
    one = found(**changes)[check]
    assert one.severity is severity
    assert evidence in one.evidence
    assert one.cause
    assert remedy in (one.remedy or "")


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("acceptance", {"acceptance": accepted(0.0, drafts=5)}),
        ("KV consistency", {"kept_in_rounds": None}),
        ("KV consistency", {"kept_in_rounds": Kept(0, 47)}),
        ("KV consistency", {"kept_in_rounds": Kept(0, 100), "kept_on_text": Kept(47, 47)}),
        ("base calibration", {"routes": None}),
        ("workload shift", {"before": None}),
        ("workload shift", {"recent": accepted(0.0, drafts=5)}),
        ("speculation pays", {"rounds": 5}),
        ("link use", {"pass_s": 0.0}),
        ("lookahead window", {"hits": 0, "late": 0, "misses": 0}),
        ("copy sizes", {"record_bytes": None}),
        ("link rate", {"link_busy_s": None}),
        ("link rate", {"link_busy_s": 50.0, "device": "cpu", "record_bytes": None}),
        ("link rate", {"link_busy_s": 50.0, "device": "cpu", "record_bytes": 27e3}),
    ],
)
def test_too_little_to_judge_is_not_judged(check: str, changes: dict[str, Any]) -> None:
    assert found(**changes)[check].severity is SKIPPED


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("workload shift", {"before": accepted(1.0, drafts=12), "recent": accepted(0.75, drafts=12)}),
        ("speculation pays", {"plain_rounds": 100, "k_asked": 0}),
        ("speculation pays", {"plain_rounds": 98, "acceptance": accepted(0.0, drafts=2)}),
        ("lookahead window", {"misses": 900, "acceptance": accepted(0.9, drafts=20)}),
        ("copy sizes", {"record_bytes": 50e3, "device": "cpu"}),
        ("wasted bytes", {"link_bytes": 0, "wasted_bytes": 0}),
        ("out of memory", {"failures": {"engine_fault": 2}}),
        ("queue", {"queue": QueueState(8, 1, None)}),
        ("KV consistency", {"echo_logprob_gap": 0.01, "kept_in_rounds": Kept(10, 100)}),
    ],
)
def test_what_chance_or_a_wish_explains_is_no_warning(check: str, changes: dict[str, Any]) -> None:
    assert found(**changes)[check].severity is FINE


def test_what_is_too_little_is_counted_in_its_own_words() -> None:
    short = found(source="t", kept_in_rounds=Kept(9, 12), kept_on_text=Kept(50, 55))["KV consistency"]
    assert short.evidence.startswith("t: its rounds kept or refused 12 drafted tokens, its text has 55, and 48 or more")
    window = found(acceptance=accepted(0.9, drafts=38))["lookahead window"]
    assert window.evidence.endswith("; 38 of 100 rounds drafted, the others foretell nothing")


def test_without_a_profile_or_a_server_there_is_no_rate_and_no_queue() -> None:
    signals = signals_of(queue=None)
    checks = by_check(check_traffic(signals, None))
    assert checks["link rate"].severity is SKIPPED
    assert "queue" not in checks


def test_nothing_that_a_cpu_does_not_have_is_advised_for_one() -> None:
    slow = {"device": "cpu", "record_bytes": 9e6, "link_busy_s": 50.0, "failures": {"out_of_memory": 3}}
    remedies = " ".join(one.remedy or "" for one in found(**slow).values())
    assert not [words for words in ("--host-memory", "pinning", "PCIe", "--rows 17") if words in remedies]
    assert "--rows 17" in (found(failures={"out_of_memory": 3})["out of memory"].remedy or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"link_busy_s": 9.0}, "the link is busy already"),
        ({"stall_s": 0.1}, "little to hide"),
        ({"stall_s": 5.0, "link_busy_s": None}, "takes longer than they are worth"),
    ],
)
def test_a_governor_that_leaves_drafting_out_is_explained_and_is_no_warning(
    changes: dict[str, Any], reason: str
) -> None:
    one = found(plain_rounds=90, **changes)["speculation pays"]
    assert one.severity is FINE
    assert reason in one.evidence
    assert "`moespeq plan org/name`" in one.evidence


def test_a_refused_test_request_is_the_reason_for_not_looking() -> None:
    one = found(kept_in_rounds=None, echo_refusal="a test request was refused (the queue is full)")["KV consistency"]
    assert "the queue is full" in one.evidence


def test_a_good_test_generation_has_nothing_but_ok() -> None:
    assert {one.severity for one in check_self_test(self_test_of(), "name")} == {FINE}


@pytest.mark.parametrize(
    ("check", "changes", "severity", "words"),
    [
        ("text", {"first_difference": 4}, PROBLEM, "part at token 5"),
        ("KV cache", {"kv_differing": 3}, PROBLEM, "3 of 8 layers"),
        ("KV cache", {"prefill_gap": 0.2}, PROBLEM, "20.00% from a prefill's"),
        ("draft", {"acceptance": Acceptance(12, 96, 9, 6)}, WARNING, "9 of 96"),
        ("draft", {"routes": RouteCounts(100, 60)}, WARNING, "60.0% of routes"),
        ("base calibration", {"base": BaseFacts(16, 4, ("a.bin is damaged.",), 0, 0, 0.09)}, PROBLEM, "a.bin"),
        ("base calibration", {"base": BaseFacts(16, 4, (), 2, None, 0.09)}, PROBLEM, "of 2, quantized again"),
        ("base calibration", {"base": BaseFacts(16, 4, (), 0, 1, 0.09)}, PROBLEM, "1 decode to other weights"),
        ("base calibration", {"base": BaseFacts(16, 4, (), 0, 0, 0.5)}, WARNING, "50.0% of their norm"),
    ],
)
def test_what_went_wrong_in_a_test_generation_is_told(
    check: str, changes: dict[str, Any], severity: Severity, words: str
) -> None:
    one = by_check(check_self_test(self_test_of(**changes), "name"))[f"self-test: {check}"]
    assert one.severity is severity
    assert words in one.evidence
    assert one.remedy
