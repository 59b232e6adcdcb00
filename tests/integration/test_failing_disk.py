"""A disk that fails in the middle of a record or a shard: one sentence that names the file, and nothing wrong kept.

The fault is one of the operating system's: a read through a FUSE file ends in EIO.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from families import make_tiny
from moespeq.prepare import prepare_store
from moespeq.store import Store
from synthetic_store import files_of

SCRIPT = Path(__file__).parents[1] / "failing_disk.py"
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]
ATTEMPTS = """
import sys
from pathlib import Path
import moespeq
from moespeq.errors import MoespeqError
from moespeq.prepare import export_checkpoint, prepare_store, verify_store
place, out = Path(sys.argv[1]), Path(sys.argv[2])

def run():
    with moespeq.load(place, device="cpu") as engine:
        engine.generate("A router sends every token to a few experts, and the others sleep. " * 3, max_new_tokens=8)

attempts = {
    "prepare": lambda: prepare_store(place, out, device="cpu"),
    "verify": lambda: verify_store(place),
    "export": lambda: export_checkpoint(place, out),
    "run": run,
}
for name in sys.argv[3:]:
    try:
        attempts[name]()
    except MoespeqError as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    probe = tmp_path_factory.mktemp("probe")
    (probe / "file").write_bytes(b"x")
    (probe / "there").mkdir()
    can_fail = shutil.which("unshare") and os.access("/dev/fuse", os.R_OK | os.W_OK)
    command = [*OWN_MOUNTS, sys.executable, str(SCRIPT), str(probe / "file"), "0", str(probe / "there"), "true"]
    if not can_fail or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no FUSE file can be mounted here")
    return make_tiny("mixtral", tmp_path_factory.mktemp("failing") / "source")


def attempt(file: Path, bad_offset: int, tmp_path: Path, place: Path, *attempts: str) -> list[str]:
    (tmp_path / "there").mkdir()
    fault = [str(SCRIPT), str(file), str(bad_offset), str(tmp_path / "there")]
    work = [sys.executable, "-c", ATTEMPTS, str(place), str(tmp_path / "out"), *attempts]
    done = subprocess.run([*OWN_MOUNTS, sys.executable, *fault, *work], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_read_error_inside_a_record_is_a_sentence_for_whoever_reads_it(source: Path, tmp_path: Path) -> None:
    store = prepare_store(source, tmp_path / "store", device="cpu")
    with Store.open(store) as opened:
        span = opened.records.rows[9].record
    file = store / "experts.bin"
    sentences = attempt(file, span.offset + span.num_bytes // 2, tmp_path, store, "verify", "export", "run")
    assert [sentence.split(":")[0] for sentence in sentences] == ["verify", "export", "run"]
    for sentence in sentences:
        assert f"StorageError: Reading {file} at byte {span.offset} failed (Input/output error); check" in sentence
    whole = files_of(source)
    assert all((tmp_path / "out" / name).read_bytes() == whole[name] for name in files_of(tmp_path / "out"))


def test_a_read_error_inside_a_shard_stops_a_preparation_that_goes_on_when_it_is_mended(
    source: Path, tmp_path: Path
) -> None:
    shard = sorted(source.glob("*.safetensors"))[-1]
    (sentence,) = attempt(shard, shard.stat().st_size * 2 // 3, tmp_path, source, "prepare")
    assert sentence.startswith("prepare: StorageError: ")
    assert str(shard) in sentence
    assert "Input/output error" in sentence
    assert "check the disk" in sentence
    assert not (tmp_path / "out").exists()
    made = prepare_store(source, tmp_path / "out", device="cpu")
    assert files_of(made) == files_of(prepare_store(source, tmp_path / "whole", device="cpu"))
