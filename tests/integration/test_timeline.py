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

NUM_LAYERS, K = 8, 6
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


def test_the_file_holds_every_span_in_microseconds_from_the_first_round_on(
    recording: Recording, tmp_path: Path
) -> None:
    write_timeline(recording.times, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    counts = {name: sum(lanes[span["tid"]] == name for span in spans) for name in lanes.values()}
    assert counts["round"] == len(recording.times)
    assert counts["verify"] == NUM_LAYERS * len(recording.times)
    assert counts["draft"] == sum(len(times.steps_s) for times in recording.times)
    assert counts["link"] == sum(len(times.link.moves) for times in recording.times) > 0
    assert spans[0]["ts"] == 0.0
    assert all(span["dur"] >= 0 for span in spans)
    first, last = recording.times[0], recording.times[-1]
    end_us = max(span["ts"] + span["dur"] for span in spans if lanes[span["tid"]] == "round")
    assert end_us == pytest.approx(1e6 * (last.end_s - first.begin_s), abs=1.0)


def test_a_time_line_that_cannot_be_written_is_one_sentence(recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        write_timeline(recording.times, tmp_path)
