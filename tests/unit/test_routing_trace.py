"""The trace file: what is written is read, and nothing else passes for one."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from moespeq.errors import TraceError
from moespeq.replay import RoutingTrace, TraceHeader, TracePosition, TraceRound

HEADER = TraceHeader(
    model="tiny",
    model_type="mixtral",
    num_layers=2,
    num_experts=4,
    top_k=2,
    record_bytes=[100, 110],
    plain_record_bytes=200,
    base_bytes=50,
    layout="nested",
    num_slots=3,
    device="cpu",
    link_bytes_per_s=1e9,
    prompt_tok=7,
    options={"k": 4, "prefetch": True},
)
POSITION = TracePosition(
    token=5,
    true=[[0, 1], [2, 3]],
    draft=[[0, 1], [3, 2]],
    ahead=[[], [2, 1]],
    step=1,
    drafted=9,
    confidence=0.5,
    accepted=True,
)
ROUND = TraceRound(
    k=4,
    accepted=1,
    committed=2,
    hits=3,
    late=1,
    misses=2,
    link_bytes=330,
    used_bytes=300,
    draft_s=0.1,
    verify_s=0.2,
    stall_s=0.05,
    link_busy_s=0.15,
)
TRACE = RoutingTrace(HEADER, [POSITION, replace(POSITION, accepted=False)], [ROUND])


def test_a_trace_is_read_as_it_was_written_and_equal_traces_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        TRACE.write(tmp_path / name)
    assert RoutingTrace.read(tmp_path / "a") == TRACE
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    "content", [b"", b"text", gzip.compress(b""), gzip.compress(b"[1]"), gzip.compress(b'{"a": 1}')]
)
def test_what_is_no_trace_is_named_so(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceError, match="t is no routing trace; `moespeq trace record` makes one"):
        RoutingTrace.read(tmp_path / "t")


def test_a_missing_file_and_a_folder_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist; `moespeq trace record` makes one"):
        RoutingTrace.read(tmp_path / "t")
    with pytest.raises(TraceError, match="cannot be read"):
        RoutingTrace.read(tmp_path)


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"schema":1', b'"schema":99', "schema 99 and this version reads 1"),
        (b'"schema":1', b'"schema":null', "schema None and this version reads 1"),
        (b'"rounds":1', b'"rounds":2', "damaged or cut short"),
        (b'"positions":2,', b"", "damaged or cut short"),
        (b'"k":4,"acc', b'"deep":4,"acc', "damaged or cut short"),
        (b'"token"', b'"token', "damaged or cut short"),
    ],
)
def test_another_schema_and_damage_are_refused(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    TRACE.write(tmp_path / "t")
    rewritten(tmp_path / "t", old, new)
    with pytest.raises(TraceError, match=message):
        RoutingTrace.read(tmp_path / "t")


def test_a_trace_cut_in_its_bytes_is_refused(tmp_path: Path) -> None:
    TRACE.write(tmp_path / "t")
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-20])
    with pytest.raises(TraceError, match="is no routing trace"):
        RoutingTrace.read(tmp_path / "t")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "full").touch()
    with pytest.raises(TraceError, match="cannot be written"):
        TRACE.write(tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
