"""A disk that fills up for real, in every kind of write: one sentence each time, and in the end the very same files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from families import make_tiny
from moespeq.prepare import prepare_store
from synthetic_store import files_of

SCRIPT = Path(__file__).parents[1] / "full_disk.py"
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    can_mount = (
        shutil.which("unshare")
        and not subprocess.run(
            [*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", str(tmp_path_factory.mktemp("probe"))], capture_output=True
        ).returncode
    )
    if not can_mount:
        pytest.skip("a file system of its own cannot be mounted here")
    return make_tiny("mixtral", tmp_path_factory.mktemp("full") / "source")


@pytest.mark.parametrize("what", ["prepare", "export"])
def test_a_disk_that_fills_up_is_named_and_gone_on_with(source: Path, tmp_path: Path, what: str) -> None:
    store = prepare_store(source, tmp_path / "source", device="cpu") if what == "export" else source
    (tmp_path / "disk").mkdir()
    command = [*OWN_MOUNTS, sys.executable, str(SCRIPT), what, str(store), str(tmp_path / "disk")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    sentences = done.stdout.splitlines()
    assert len(sentences) >= 4
    for sentence in sentences:
        assert sentence.startswith(f"The disk of {tmp_path / 'disk'}"), sentence
        assert "is full: " in sentence
        assert "free some space and run the same command again" in sentence
    if what == "export":
        assert files_of(tmp_path / "rescued") == files_of(source)
    else:
        made = prepare_store(source, tmp_path / "elsewhere" / source.name, device="cpu")
        assert files_of(tmp_path / "rescued") == files_of(made)
