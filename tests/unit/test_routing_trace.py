"""The trace file: what is written is read, and nothing else passes for one."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from moespeq.errors import TraceError
from moespeq.replay import RoutingTrace, TraceHeader, TracePosition, TraceRound, routing_trace

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
    resident=[[0, 2], [1]],
    draft_step_s=2e-3,
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
    committed=1,
    hits=3,
    late=1,
    misses=2,
    link_bytes=330,
    used_bytes=300,
    draft_s=0.1,
    verify_s=0.2,
    stall_s=0.05,
    link_busy_s=0.15,
    layer_experts=[3],
    layer_s=[0.01],
)
TRACE = RoutingTrace(HEADER, [POSITION, replace(POSITION, accepted=False)], [ROUND])


def test_a_trace_is_read_as_it_was_written_and_equal_traces_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        TRACE.write(tmp_path / name)
    assert RoutingTrace.read(tmp_path / "a") == TRACE
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("content", [b"", b"text", b"[1]", b'{"a": 1}'])
def test_what_is_no_trace_is_named_so(content: bytes, is_packed: bool, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(gzip.compress(content) if is_packed else content)
    with pytest.raises(TraceError, match="t is no routing trace; `moespeq trace record` makes one"):
        RoutingTrace.read(tmp_path / "t")


def test_a_missing_file_and_a_folder_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist; `moespeq trace record` makes one"):
        RoutingTrace.read(tmp_path / "t")
    with pytest.raises(TraceError, match="is no regular file; give a trace"):
        RoutingTrace.read(tmp_path)


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"schema":2', b'"schema":99', "schema 99 and this version reads 2"),
        (b'"schema":2', b'"schema":null', "schema None and this version reads 2"),
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


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (b'"num_layers":2', b'"num_layers":0', "header: num_layers"),
        (b'"num_experts":4', b'"num_experts":"x"', "header: num_experts"),
        (b'"num_experts":4', b'"num_experts":1000000000', "header: num_experts"),
        (b'"top_k":2', b'"top_k":5', "header: num_experts"),
        (b'"num_slots":3', b'"num_slots":0', "header: num_slots"),
        (b'"record_bytes":[100,110]', b'"record_bytes":[]', "header: record_bytes"),
        (b'"record_bytes":[100,110]', b'"record_bytes":[100,-1]', "header: record_bytes"),
        (b'"link_bytes_per_s":1000000000.0', b'"link_bytes_per_s":-1', "header: link_bytes_per_s"),
        (b'"options":{"k":4', b'"options":{"rows":null,"k":4', "header: options, rows"),
        (b'"true":[[0,1],[2,3]]', b'"true":[[0,1]]', "token 0: true"),
        (b'"true":[[0,1],[2,3]]', b'"true":[[0,1],[2,99]]', "token 0: true"),
        (b'"draft":[[0,1],[3,2]]', b'"draft":[[0,0],[3,2]]', "token 0: draft"),
        (b'"draft":[[0,1],[3,2]]', b'"draft":[[],[3,2]]', "token 0: draft"),
        (b'"ahead":[[],[2,1]]', b'"ahead":[[],[2]]', "token 0: ahead"),
        (b'"confidence":0.5', b'"confidence":NaN', "token 0: confidence"),
        (b'"confidence":0.5', b'"confidence":1e30', "token 0: confidence"),
        (b'"confidence":0.5', b'"confidence":null', "token 0: confidence"),
        (b'"step":1', b'"step":1e30', "token 0: step"),
        (b'"accepted":true', b'"accepted":1', "token 0: accepted"),
        (b'"hits":3', b'"hits":-1', "round 0: hits"),
        (b'"k":4,"acc', b'"k":0,"acc', "round 0: k"),
        (b'"committed":1', b'"committed":0', "round 0: committed"),
        (b'"verify_s":0.2', b'"verify_s":NaN', "round 0: verify_s"),
        (b'"resident":[[0,2],[1]]', b'"resident":[[0,0],[1]]', "header: resident"),
        (b'"resident":[[0,2],[1]]', b'"resident":[[0,4],[1]]', "header: resident"),
        (b'"resident":[[0,2],[1]]', b'"resident":[[0,2],[1,2]]', "header: resident"),
        (b'"resident":[[0,2],[1]]', b'"resident":[[0,2]]', "header: resident"),
        (b'"layer_experts":[3]', b'"layer_experts":[5]', "round 0: layer_experts"),
        (b'"layer_experts":[3]', b'"layer_experts":[]', "round 0: layer_experts"),
        (b'"layer_s":[0.01]', b'"layer_s":[-1]', "round 0: layer_s"),
        (b'"layer_s":[0.01]', b'"layer_s":0.01', "round 0: layer_s"),
        (b'"draft_step_s":0.002', b'"draft_step_s":Infinity', "header: draft_step_s"),
        (b'"draft_step_s":0.002', b'"draft_step_s":1' + b"0" * 400, "header: draft_step_s"),
        (b'"verify_s":0.2', b'"verify_s":1e308', "round 0: verify_s"),
        (b'"hits":3,"late":1,"misses":2', b'"hits":0,"late":0,"misses":0', "rounds that ask for no expert"),
        (b'"verify_s":0.2', b'"verify_s":0', "round 0: verify_s"),
        (b'"verify_s":0.2', b'"verify_s":0.05', "rounds that only wait"),
        (b'"committed":1', b'"committed":2', "tokens and rounds do not add up"),
        (b'"positions":2', b'"positions":1', "damaged"),
        (b'"rounds":1', b'"rounds":0', "more lines than it says"),
    ],
)
def test_what_no_run_can_have_recorded_is_refused_by_its_name(
    old: bytes, new: bytes, fault: str, tmp_path: Path
) -> None:
    TRACE.write(tmp_path / "t")
    rewritten(tmp_path / "t", old, new)
    with pytest.raises(TraceError, match=f"t is damaged.*{fault}|{fault}.*record it again"):
        RoutingTrace.read(tmp_path / "t")


def test_devices_deep_nests_and_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="no regular file"):
        RoutingTrace.read(Path("/dev/zero"))
    (tmp_path / "deep").write_bytes(gzip.compress(b"[" * 100_000))
    monkeypatch.setattr(routing_trace, "_MOST_BYTES", 1000)
    (tmp_path / "bomb").write_bytes(gzip.compress(b" " * 100_000))
    for name in ("deep", "bomb"):
        with pytest.raises(TraceError, match="is no routing trace"):
            RoutingTrace.read(tmp_path / name)


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
