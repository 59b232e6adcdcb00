"""A recorded run and two scrapes of a server give the same signals; what is neither is refused with one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moespeq.doctor.run_probe import read_run, signals_of_trace
from moespeq.doctor.signals import Acceptance, Kept, QueueState, RouteCounts
from moespeq.doctor.snapshot import Snapshot, signals_between
from moespeq.errors import TraceError, UsageError
from synthetic_trace import synthetic_trace

RUN: dict[str, Any] = {
    "rounds": 4,
    "hits": 90,
    "late": 5,
    "misses": 5,
    "link_bytes": 1000,
    "wasted_bytes": 100,
    "ttft_s": 1.0,
    "decode_s": 2.0,
    "draft_s": 0.5,
    "stall_s": 0.25,
    "link_busy_s": 0.5,
    "routes": {"exact": 80, "same_set": 10, "wrong": 10},
    "k_per_round": [4, 0, 4, 4],
    "accepted_per_round": [4, 0, 0, 2],
    "device": "cuda",
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "run.json"
    path.write_text(json.dumps(RUN | changes))
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    signals = read_run(write(tmp_path), "org/name")
    assert (signals.source, signals.model, signals.device) == ("run.json", "org/name", "cuda")
    assert (signals.rounds, signals.plain_rounds, signals.asked) == (4, 1, 100)
    assert signals.acceptance == Acceptance(drafts=3, drafted_tok=12, accepted_tok=6, first_accepted=2)
    assert (signals.before, signals.recent) == (Acceptance(1, 4, 4, 1), Acceptance(2, 8, 2, 1))
    assert signals.routes == RouteCounts(100, 10)
    assert (signals.pass_s, signals.stall_s, signals.k_asked) == (3.0, 0.25, "auto")


def test_a_run_that_never_drafted_was_asked_not_to(tmp_path: Path) -> None:
    assert read_run(write(tmp_path, k_per_round=[0] * 4, accepted_per_round=[0] * 4)).k_asked == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 5},
        {"hits": -1},
        {"stall_s": "x"},
        {"k_per_round": None},
        {"decode_s": float("nan")},
        {"routes": []},
        {"hits": True},
        {"hits": 10**400},
        {"decode_s": 1e308},
        {"accepted_per_round": [1]},
    ],
)
def test_figures_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"is no recorded run; give the output of `moespeq run --json`"):
        read_run(write(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"text": "x"}'])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is no recorded run"):
        read_run(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\)"):
        read_run(tmp_path / "nothing")
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(tmp_path)


def test_a_damaged_trace_is_refused_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(TraceError):
        read_run(path)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    synthetic_trace(acceptance=0.9, fidelity=0.8).write(path)
    signals, trace = read_run(path), synthetic_trace(acceptance=0.9, fidelity=0.8)
    assert signals.model == "MODEL", "what the trace calls it is no place of a model"
    assert read_run(path, "folder/of/it").model == "folder/of/it"
    assert signals.rounds == len(trace.rounds)
    assert signals.routes is not None
    assert 0.05 < signals.routes.wrong_share < 0.5
    assert signals.kept_on_text == Kept(sum(one.accepted for one in trace.positions), len(trace.positions))
    assert signals.kept_in_rounds is not None
    assert abs(signals.kept_in_rounds.share - signals.kept_on_text.share) < 0.1
    assert signals.record_bytes == trace.header.record_bytes[0]


def test_a_trace_of_a_hub_id_names_it_in_commands() -> None:
    trace = synthetic_trace()
    assert (
        signals_of_trace(replace(trace, header=replace(trace.header, model="org/name")), None, "t").model == "org/name"
    )


def test_a_name_that_a_server_goes_by_is_no_model_of_a_command() -> None:
    served = metrics(1000, 950).replace("org/name", "demo")
    assert signals_between(scrape(served), scrape(served), 5.0).model == "MODEL"


def test_rounds_that_keep_less_than_the_text_allows_are_seen_in_a_trace() -> None:
    trace = synthetic_trace(acceptance=1.0)
    spoilt = replace(trace, rounds=[replace(one, accepted=0, committed=1) for one in trace.rounds] * 3)
    signals = signals_of_trace(spoilt, None, "t")
    assert signals.kept_in_rounds == Kept(0, 69)
    assert signals.kept_on_text is not None
    assert signals.kept_on_text.share == 1.0


def test_bytes_that_slots_may_still_hold_are_not_called_wasted() -> None:
    trace = synthetic_trace(num_slots=2)
    unused = [replace(one, link_bytes=10 * trace.header.record_bytes[0], used_bytes=0) for one in trace.rounds]
    signals = signals_of_trace(replace(trace, rounds=unused), None, "t")
    assert signals.wasted_bytes == signals.link_bytes - 2 * trace.header.record_bytes[0]


def scrape(text: str) -> Snapshot:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return Snapshot.of([(one.name, one.labels, one.value) for one in samples])


def metrics(drafts: int, first: int, *, waiting: int = 0) -> str:
    return f"""
# TYPE spec_decode_num_drafts counter
spec_decode_num_drafts_total {drafts}
# TYPE spec_decode_num_draft_tokens counter
spec_decode_num_draft_tokens_total {4 * drafts}
# TYPE spec_decode_num_accepted_tokens counter
spec_decode_num_accepted_tokens_total {4 * first}
# TYPE spec_decode_num_accepted_tokens_per_pos counter
spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}
spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {first}
# TYPE spec_depth histogram
spec_depth_bucket{{le="0.0"}} 3
spec_depth_bucket{{le="+Inf"}} {drafts + 3}
spec_depth_count {drafts + 3}
# TYPE expert_bytes counter
expert_bytes_total{{cause="demand"}} {100 * drafts}
expert_bytes_total{{cause="stage"}} {drafts}
# TYPE draft_routes counter
draft_routes_total{{match="exact"}} {9 * drafts}
draft_routes_total{{match="wrong"}} {drafts}
# TYPE engine info
engine_info{{model="org/name",device="cuda",k="auto",lookahead="4",record_bytes="9000000"}} 1.0
# TYPE verify_seconds histogram
verify_seconds_sum {drafts / 10}
# TYPE e2e_request_latency_seconds histogram
e2e_request_latency_seconds_count 5
# TYPE request_failure counter
request_failure_total{{reason="out_of_memory"}} 2
# TYPE num_requests_waiting gauge
num_requests_waiting {waiting}
"""


def test_a_busy_servers_window_is_what_counts() -> None:
    signals = signals_between(scrape(metrics(1000, 950, waiting=3)), scrape(metrics(1100, 990, waiting=9)), 5.0)
    assert (signals.source, signals.model, signals.device) == ("the last 5 s", "org/name", "cuda")
    assert signals.acceptance == signals.recent == Acceptance(100, 400, 160, 40)
    assert signals.before == Acceptance(1000, 4000, 3800, 950)
    assert (signals.rounds, signals.plain_rounds, signals.link_bytes) == (100, 0, 10100)
    assert signals.routes == RouteCounts(1000, 100)
    assert (signals.lookahead_tok, signals.record_bytes, signals.failures) == (4, 9e6, {"out_of_memory": 2})
    assert signals.queue == QueueState(3, 0, 110 / 5)


def test_an_idle_servers_life_is_what_counts() -> None:
    signals = signals_between(scrape(metrics(1000, 950)), scrape(metrics(1001, 951)), 5.0)
    assert signals.source == "the server's life"
    assert (signals.rounds, signals.plain_rounds) == (1004, 3)
    assert signals.acceptance == Acceptance(1001, 4004, 3804, 951)
    assert signals.recent == Acceptance(1, 4, 4, 1)


def test_a_server_of_an_older_version_says_less() -> None:
    text = "\n".join(line for line in metrics(100, 90).splitlines() if "engine" not in line)
    signals = signals_between(Snapshot.of([]), scrape(text), 5.0)
    assert (signals.model, signals.record_bytes, signals.lookahead_tok) == ("MODEL", None, None)
