"""Killed at any step, prepare and export leave nothing corrupt under a final name, keep what was complete, and go on.

KILL_POINTS=100 in the environment chooses more points at random; docs/lab-notes.md records such a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from families import make_tiny
from moespeq.prepare import export_checkpoint, prepare_store, verify_store
from moespeq.store import Store, StoreWriter
from synthetic_store import files_of

SCRIPT = Path(__file__).parents[1] / "killed_runs.py"
NUM_POINTS = int(os.environ.get("KILL_POINTS", "4"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("kills") / "source")


@pytest.fixture(scope="module")
def store(source: Path) -> Path:
    return prepare_store(source, source.with_name("whole"), device="cpu")


def killed_runs(what: str, source: Path, out: Path) -> list[int]:
    """The steps at which runs to `out` were killed; what they left is at `OUT-STEP` and `OUT-STEP.partial`."""
    command = [sys.executable, str(SCRIPT), what, str(source), str(out), str(NUM_POINTS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=3000)
    points = [int(line) for line in done.stdout.split()]
    assert len(points) == NUM_POINTS
    return points


def durable_records(partial: Path) -> int:
    """How many records the journal of an unfinished store holds for certain."""
    journal = partial / "journal"
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return max((json.loads(line).get("num_records", 0) for line in lines), default=0)


def test_a_preparation_killed_anywhere_goes_on_to_the_same_store_and_keeps_its_records(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moespeq.prepare.prepare.COMMIT_BYTES", 60_000)
    whole = files_of(store)
    appended: list[int] = []
    append = StoreWriter.append

    def counted(*args: Any, **named: Any) -> None:
        appended.append(1)
        append(*args, **named)

    monkeypatch.setattr(StoreWriter, "append", counted)
    with Store.open(store) as opened:
        num_records = len(list(opened.keys()))
    for at in killed_runs("prepare", source, tmp_path / "store"):
        out, partial = tmp_path / f"store-{at}", tmp_path / f"store-{at}.partial"
        if out.exists():
            assert files_of(out) == whole, at
            continue
        kept = durable_records(partial)
        appended.clear()
        prepare_store(source, out, device="cpu")
        assert files_of(out) == whole, at
        assert len(appended) == num_records - kept, at
        assert not partial.exists(), at


def test_an_export_killed_anywhere_has_no_wrong_file_and_goes_on_with_the_missing_ones(
    source: Path, store: Path, tmp_path: Path
) -> None:
    whole = files_of(source)
    for at in killed_runs("export", store, tmp_path / "out"):
        out = tmp_path / f"out-{at}"
        found = {path.name: path.stat().st_mtime_ns for path in out.glob("*") if path.suffix != ".partial"}
        for name in found:
            assert (out / name).read_bytes() == whole[name], (at, name)
        export_checkpoint(store, out)
        assert files_of(out) == whole, at
        assert {name: (out / name).stat().st_mtime_ns for name in found} == found, at
    verify_store(store, against=source)
