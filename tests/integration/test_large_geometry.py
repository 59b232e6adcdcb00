"""Models of a trillion weights are planned and indexed in seconds by headers alone, and a store may have terabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import synthetic_store
from moespeq.store import Store
from moespeq.store.manifest import digest_of
from moespeq.store.records import PAGE_BYTES, RecordEnds, RecordRow, Span, round_up
from moespeq.types import ExpertKey

SCRIPT = Path(__file__).parents[1] / "large_geometry.py"
MOST_S, MOST_MIB = 5.0, 500
NUM_EXPERTS, LARGEST_BYTES, LAST_BYTES = 300, (1 << 32) - 1, 70_000


@pytest.mark.parametrize(("num_layers", "num_experts"), [(48, 512)])  # 61 x 256 takes less: docs/lab-notes.md
def test_headers_of_a_large_model_are_planned_and_indexed_in_seconds(
    tmp_path: Path, num_layers: int, num_experts: int
) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(num_layers), str(num_experts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    took = json.loads(done.stdout.splitlines()[-1])
    for name in ("plan", "index"):
        assert took[name]["s"] < MOST_S, took
        assert took[name]["more_mib"] < MOST_MIB, took


def test_a_record_beyond_two_terabytes_is_found(tmp_path: Path) -> None:
    store = synthetic_store.build(tmp_path / "store")
    last = bytes(range(250)) * (LAST_BYTES // 250)
    ends, rows = RecordEnds.of_nothing(NUM_EXPERTS, 1), []
    for position in range(2 * NUM_EXPERTS):
        is_last = position == 2 * NUM_EXPERTS - 1
        num_bytes = len(last) if is_last else LARGEST_BYTES
        base_start, start = ends.starts(position, 96, num_bytes)
        rows.append(RecordRow(Span(base_start, 96, 0), Span(start, num_bytes, zlib.crc32(last) if is_last else 0)))
        ends.add(position, rows[-1])
    assert rows[-1].record.offset > 2 << 40
    sizes = [round_up(end, PAGE_BYTES) for end in (ends.base, *ends.experts)]
    for name, size_bytes in zip(("base.bin", "experts.bin"), sizes, strict=True):
        try:
            os.truncate(store / name, size_bytes)
        except OSError as error:
            pytest.skip(f"this file system holds no file of {size_bytes} bytes ({error.strerror})")
    with (store / "experts.bin").open("r+b") as file:
        file.seek(rows[-1].record.offset)
        file.write(last)
    table = b"".join(row.to_bytes() for row in rows)
    (store / "records.bin").write_bytes(table)
    values = json.loads((store / "manifest.json").read_text())
    del values["digest"]
    values.update(num_experts=NUM_EXPERTS, base_file_bytes=sizes[0], experts_file_bytes=sizes[1:])
    values["records"] = {"size_bytes": len(table), "crc32": zlib.crc32(table)}
    (store / "manifest.json").write_text(json.dumps({**values, "digest": digest_of(values)}))
    with Store.open(store) as opened:
        buffer = bytearray(len(last))
        opened.read_record_into(ExpertKey(1, NUM_EXPERTS - 1), memoryview(buffer), verify=True)
        assert buffer == last
