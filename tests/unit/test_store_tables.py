"""The manifest and the binary tables: exact round trips, and no tolerance for anything unexpected."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import synthetic_store
from moespeq.errors import StoreError
from moespeq.store import ExpertPiece, Manifest, Store, TensorEntry, pieces
from moespeq.store.manifest import SCHEMA, digest_of
from moespeq.store.pieces import pack_pieces, unpack_pieces
from moespeq.store.records import ROW_BYTES, RecordRow, RecordTable, Span, start_of_record
from moespeq.types import ExpertKey


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return synthetic_store.build(tmp_path / "store")


def edit(store: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((store / "manifest.json").read_text())
    change(values)
    del values["digest"]
    (store / "manifest.json").write_text(json.dumps({**values, "digest": digest_of(values)}))


def test_a_manifest_survives_the_round_trip_byte_for_byte(store: Path) -> None:
    assert Manifest.load(store).to_json() == (store / "manifest.json").read_text()


def test_another_schema_is_refused_naming_both(store: Path) -> None:
    edit(store, lambda values: values.update(schema=SCHEMA + 6))
    with pytest.raises(StoreError, match=f"schema {SCHEMA + 6} and this version reads schema {SCHEMA}"):
        Store.open(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("top_k"),
        lambda v: v.update(colour="red"),
        lambda v: v.update(num_experts="3"),
        lambda v: v.update(num_experts=True),
        lambda v: v.update(num_experts=-3),
        lambda v: v.update(top_k=0),
        lambda v: v.update(top_k=4),
        lambda v: v.update(layouts=[], module_names=[]),
        lambda v: v["source"][0].update(name=5),
        lambda v: v["files"][0].update(sha256=5),
        lambda v: v["records"].update(crc32="5"),
        lambda v: v.update(layouts=["nested", "zip"]),
        lambda v: v.update(layouts=["nested"]),
        lambda v: v.update(matrices=[["up", 8]]),
        lambda v: v.update(base_format={"bits": 5, "group": 64, "zero_point": False}),
        lambda v: v.update(base_format=None),
        lambda v: v["records"].update(extra=1),
        lambda v: v["source"][0].update(name="../model.safetensors"),
        lambda v: v["files"][0].update(path="model/../../evil"),
        lambda v: v["files"][0].update(path="/etc/passwd"),
        lambda v: v["files"][0].pop("sha256"),
        lambda v: v.update(experts_file_bytes=[]),
        lambda v: v.update(experts_file_bytes=[4096] * 3),
        lambda v: v.update(experts_file_bytes=4096),
        lambda v: v.update(num_experts=1 << 63),
        lambda v: v.update(num_experts=3.0),
        lambda v: v.update(matrices=[]),
        lambda v: v.update(matrices=[["up", 8, 0]]),
        lambda v: v.update(matrices=[["up", 8, 16], ["up", 8, 16]]),
        lambda v: v.update(module_names=["layer.0", "layer.0"]),
        lambda v: v["files"].append(v["files"][0]),
        lambda v: v["source"].append(v["source"][0]),
        lambda v: v["files"].append({**v["files"][0], "path": "model/model.safetensors"}),
        lambda v: v["files"][0].update(path="model/\0"),
        lambda v: v["files"][0].update(path="model/" + "n" * 300),
    ],
)
def test_a_manifest_with_anything_unexpected_is_refused(store: Path, change: Callable[[Any], object]) -> None:
    edit(store, change)
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        Store.open(store)


def test_a_manifest_edited_without_its_digest_is_refused(store: Path) -> None:
    path = store / "manifest.json"
    whole = path.read_text()
    for old, new in [('"top_k": 1', '"top_k": 2'), ('"synthetic"', '"synthetiC"'), ('"digest"', '"digesT"')]:
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(StoreError, match=r"manifest\.json is damaged .*digest"):
            Store.open(store)


@pytest.mark.parametrize("text", ["", "3", "[]", "{", "[" * 100_000])
def test_a_manifest_that_is_no_object_is_refused(store: Path, text: str) -> None:
    (store / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Store.open(store)


def test_a_folder_without_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="it is no store"):
        Store.open(tmp_path)


@pytest.mark.parametrize("name", ["records.bin", "pieces.bin"])
def test_a_flipped_bit_in_a_table_is_noticed(store: Path, name: str) -> None:
    data = bytearray((store / name).read_bytes())
    data[5] ^= 1
    (store / name).write_bytes(data)
    with pytest.raises(StoreError, match=rf"{name} is damaged"), Store.open(store) as opened:
        opened.pieces()


def resign(store: Path, name: str, data: bytes) -> None:
    """Replace a table, and say so in the manifest: what a hostile hand does."""
    (store / f"{name}.bin").write_bytes(data)
    edit(store, lambda values: values.update({name: {"size_bytes": len(data), "crc32": zlib.crc32(data)}}))


@pytest.mark.parametrize(
    "row",
    [
        RecordRow(Span(0, 96, 0), Span(1 << 40, 100, 0)),  # outside its file
        RecordRow(Span(0, 96, 0), Span((1 << 64) - 1, 100, 0)),
        RecordRow(Span(0, 95, 0), Span(0, 100, 0)),  # no base of such matrices
        RecordRow(Span(0, 96, 0), Span(0, 4196, 0)),  # over its neighbour
        RecordRow(Span(0, 96, 0), Span(0, 0, 0)),
        RecordRow(Span(64, 96, 0), Span(0, 100, 0)),
    ],
)
def test_a_record_where_none_was_appended_is_refused(store: Path, row: RecordRow) -> None:
    resign(store, "records", row.to_bytes() + (store / "records.bin").read_bytes()[ROW_BYTES:])
    with pytest.raises(StoreError, match=r"records\.bin gives expert [01] of MoE layer 0 a place or a length"):
        Store.open(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(base_file_bytes=v["base_file_bytes"] + 4096),
        lambda v: v.update(experts_file_bytes=[v["experts_file_bytes"][0] + 4096]),
        lambda v: v.update(matrices=[["up", 8, 32]]),
        lambda v: v.update(base_format={"bits": 2, "group": 4, "zero_point": True}),
        lambda v: v.update(num_experts=2, top_k=1),
        lambda v: v.update(num_experts=6),
        lambda v: v.update(layouts=["plain", "nested"]),
    ],
)
def test_a_manifest_that_disagrees_with_the_record_table_is_refused(
    store: Path, change: Callable[[Any], object]
) -> None:
    edit(store, change)
    with pytest.raises(StoreError, match=r"records\.bin .*prepare the store again"):
        Store.open(store)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("file", 1),
        ("tensor", 6),
        ("layer", 2),
        ("expert", 3),
        ("matrix", 1),
        ("row_start", 1),
        ("row_start", 2**32 - 1),
        ("num_rows", 0),
        ("num_rows", 2**32 - 1),
        ("index", 1),
        ("index", -2),
        ("index", 2**31 - 1),
    ],
)
def test_a_piece_that_is_no_part_of_an_expert_or_of_its_tensor_is_refused(store: Path, field: str, value: int) -> None:
    synthetic_store.add_source_header(store)
    with Store.open(store) as opened:
        assert len(opened.pieces()) == 6
    table = np.frombuffer(bytearray((store / "pieces.bin").read_bytes()), dtype=pieces._PIECE)
    table[field][0] = value
    resign(store, "pieces", table.tobytes())
    with Store.open(store) as opened, pytest.raises(StoreError, match=r"pieces\.bin .*prepare the store again"):
        opened.pieces()


@pytest.mark.parametrize("size", [1, 35, 37])
def test_a_table_of_no_whole_rows_is_refused(store: Path, size: int) -> None:
    resign(store, "records", bytes(size))
    with pytest.raises(StoreError, match=r"records\.bin has not one row for each expert"):
        Store.open(store)


@pytest.mark.parametrize(
    "name", ["experts.bin", "records.bin", "pieces.bin", "dense/model.safetensors", "manifest.json"]
)
def test_a_link_out_of_a_store_is_refused_before_it_is_read(store: Path, tmp_path: Path, name: str) -> None:
    (store / name).rename(tmp_path / "secret")
    (store / name).symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match=rf"{Path(name).name} is a link out of the store, to .*secret"):
        Store.open(store)


@given(rows=st.lists(st.tuples(st.integers(0, 2**63), *[st.integers(0, 2**32 - 1)] * 2), min_size=6, max_size=6))
@settings(deadline=None, max_examples=30)
def test_record_rows_survive_the_round_trip(rows: list[tuple[int, int, int]]) -> None:
    written = [RecordRow(Span(*rows[i]), Span(*rows[i + 1])) for i in (0, 2, 4)]
    table = RecordTable.from_bytes(b"".join(row.to_bytes() for row in written), num_experts=3)
    assert table.rows == tuple(written)
    assert table[ExpertKey(0, 1)] == written[1]


@pytest.mark.parametrize(
    ("end", "num_bytes", "start"),
    [(0, 10, 0), (65, 10, 128), (65, 65535, 128), (65, 65536, 4096), (4096, 65536, 4096)],
)
def test_large_records_begin_on_a_page_and_small_ones_are_packed(end: int, num_bytes: int, start: int) -> None:
    assert start_of_record(end, num_bytes) == start


def test_pieces_survive_the_round_trip() -> None:
    files = [[TensorEntry(name, "BF16", (4, 2, 3), 0, 48) for name in names] for names in (["a", "b"], ["c"])]
    written = (
        ExpertPiece("c", 60, 255, "down", 0, 2, 3, True),
        ExpertPiece("a", 0, 0, "gate_up", 1408, 1408, None, False),
        ExpertPiece("b", 1, 2, "gate_up", 0, 2, 0, False),
    )
    assert unpack_pieces(pack_pieces(written, files, ["gate_up", "down"]), files, ["gate_up", "down"]) == written
