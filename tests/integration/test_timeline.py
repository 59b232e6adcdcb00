"""The time line of a recorded run: drafting, copies and verified layers in their order, overlapping where they do."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import moespeq
from moespeq.decode.recording import Recording, record
from moespeq.decode.timeline import RoundTimes, write_timeline
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.errors import TraceError

Span = tuple[float, float]
Lanes = dict[str, list[Span]]
NUM_LAYERS, K = 8, 6
ROUNDED_US = 0.15
PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESPEQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        engine = moespeq.load(MODEL_FOLDER, device="cpu", k=K, device_memory="7MiB", ctx_size=384, link_bytes_per_s=4e6)
    with engine:
        return record(engine, PROMPT, max_new_tokens=16, ignore_eos=True)


def test_every_round_has_its_steps_and_layers_in_order(recording: Recording) -> None:
    assert len(recording.times) == len(recording.trace.rounds)
    for times, measured in zip(recording.times, recording.trace.rounds, strict=True):
        assert (times.k, times.accepted) == (measured.k, measured.accepted)
        assert len(times.steps_s) == (times.k + 1 if times.k else 0)
        assert len(times.layers_s) == NUM_LAYERS
        moments = [times.begin_s, *times.steps_s, *times.layers_s, times.end_s]
        assert all(before <= after for before, after in pairwise(moments))


def drafting_of(times: RoundTimes) -> tuple[float, float]:
    return times.begin_s, times.steps_s[-1]


def test_records_cross_the_link_while_the_draft_runs(recording: Recording) -> None:
    drafted = [times for times in recording.times if times.k]
    overlapping = [
        move
        for times in drafted
        for move in times.link.moves
        if move.begin_s < drafting_of(times)[1] and move.end_s > drafting_of(times)[0]
    ]
    assert drafted
    assert overlapping


@pytest.fixture(scope="module")
def lanes(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Lanes:
    """The spans of the written file, (begin, end) in microseconds, by the names of their lanes."""
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    write_timeline(recording.times, path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans: Lanes = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    return {name: sorted(of_lane) for name, of_lane in spans.items()}


def copies_of(lanes: Lanes) -> list[Span]:
    return [span for name, spans in lanes.items() if name.startswith("link") for span in spans]


def meet(left: Span, right: Span) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def test_the_file_holds_every_span_in_microseconds_from_the_first_round_on(recording: Recording, lanes: Lanes) -> None:
    times = recording.times
    assert list(lanes)[:5] == ["round", "draft", "verify", "waiting for the link", "link"]
    assert len(lanes["round"]) == len(times)
    assert len(lanes["verify"]) == NUM_LAYERS * len(times)
    assert len(lanes["draft"]) == sum(len(one.steps_s) for one in times)
    assert len(lanes["waiting for the link"]) == sum(len(one.link.stalls) for one in times) > 0
    assert len(copies_of(lanes)) == sum(len(one.link.moves) for one in times) > 0
    assert lanes["round"][0][0] == 0.0
    assert all(begin <= end for spans in lanes.values() for begin, end in spans)
    assert lanes["round"][-1][1] == pytest.approx(1e6 * (times[-1].end_s - times[0].begin_s), abs=1.0)


def test_no_two_spans_of_a_lane_are_at_once(lanes: Lanes) -> None:
    assert all(before[1] <= after[0] + ROUNDED_US for spans in lanes.values() for before, after in pairwise(spans)), (
        "a viewer would nest or drop one of them"
    )


def test_copies_are_seen_beside_draft_steps_and_beside_verified_layers(lanes: Lanes) -> None:
    copies = copies_of(lanes)
    assert any(meet(copy, step) for copy in copies for step in lanes["draft"])
    assert any(meet(copy, layer) for copy in copies for layer in lanes["verify"])
    assert not any(meet(step, layer) for step in lanes["draft"] for layer in lanes["verify"])


def test_each_wait_lies_in_a_verified_layer_and_is_one_for_copies(lanes: Lanes) -> None:
    waits = lanes["waiting for the link"]
    assert all(any(meet(wait, layer) for layer in lanes["verify"]) for wait in waits)
    assert any(meet(wait, copy) for wait in waits for copy in copies_of(lanes))


def test_each_step_and_layer_lies_in_its_round(lanes: Lanes) -> None:
    for span in [*lanes["draft"], *lanes["verify"]]:
        assert any(begin <= span[0] + ROUNDED_US and span[1] <= end + ROUNDED_US for begin, end in lanes["round"])


def test_a_time_line_that_cannot_be_written_is_one_sentence(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        write_timeline(recording.times, tmp_path)
