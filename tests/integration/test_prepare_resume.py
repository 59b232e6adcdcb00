"""Whatever interrupts a preparation, going on gives the store of an uninterrupted run, byte for byte."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import make_tiny
from moespeq.errors import StorageError, StoreError
from moespeq.nested import Layout
from moespeq.prepare import prepare_cached, prepare_store
from synthetic_store import files_of

# Imports once, then forks a process for each kill, before any thread exists that a fork could break.
_KILLED_RUNS = """
import os, signal, sys
from pathlib import Path
from moespeq.prepare import prepare, prepare_store

class Killer:
    def __init__(self, after):
        self.left = after
    def update(self, done_bytes, total_bytes, what):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

prepare.COMMIT_BYTES = 60_000
for after in sys.argv[3:]:
    child = os.fork()
    if child == 0:
        prepare_store(Path(sys.argv[1]), Path(sys.argv[2]), progress=Killer(int(after)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


class InterruptError(Exception):
    """Raised by a sink, as an interrupt key would be."""


class Stopper:
    """A sink that calls `stop` at its n-th update."""

    def __init__(self, after: int, stop: Callable[[], None]) -> None:
        self.left, self._stop = after, stop

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        self.left -= 1
        if self.left == 0:
            self._stop()


def interrupt() -> None:
    raise InterruptError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, the middle one noise, so that it is written twice."""
    folder = make_tiny("mixtral", tmp_path_factory.mktemp("resume") / "source", shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.startswith("model.layers.1.block_sparse_moe.experts."):
            tensor.view(torch.int16).random_(-(2**15), 2**15, generator=noise)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    return files_of(prepare_store(source, source.with_name("whole")))


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespeq.prepare.prepare.COMMIT_BYTES", 60_000)


def test_an_interrupt_at_any_update_is_made_good(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Stop at the first update, go on and stop at the second, and so on until a run finishes."""
    out, runs = tmp_path / "store", 0
    while not out.exists():
        runs += 1
        try:
            prepare_store(source, out, progress=Stopper(runs, interrupt))
        except InterruptError:
            assert not out.exists()
    assert runs > 5
    assert files_of(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_going_on_inside_a_layer_keeps_the_units_that_were_durable(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InterruptError):  # at the 14th expert: the units end at the 4th and 8th of each layer
        prepare_store(source, tmp_path / "store", progress=Stopper(16, interrupt))
    updates: list[int] = []

    class Sink:
        def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
            updates.append(done_bytes)

    prepare_store(source, tmp_path / "store", progress=Sink())
    dense, durable, *_ = updates
    assert durable - dense == 12 * 2 * (96 * 64 + 64 * 48)


def test_a_kill_at_several_points_is_made_good(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "store"
    command = [sys.executable, "-c", _KILLED_RUNS, str(source), str(out), "1", "6", "9", "14", "17"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (tmp_path / "store.partial" / "store" / "experts.bin").stat().st_size > 0
    prepare_store(source, out)
    assert files_of(out) == whole


def test_a_second_preparation_of_the_same_store_is_refused_while_one_runs(source: Path, tmp_path: Path) -> None:
    refused = []

    def prepare_again() -> None:
        with pytest.raises(StoreError, match="Another process is preparing"):
            prepare_store(source, tmp_path / "store")
        refused.append(True)

    prepare_store(source, tmp_path / "store", progress=Stopper(5, prepare_again))
    assert refused
    with pytest.raises(StoreError, match="exists already"):
        prepare_store(source, tmp_path / "store")


def test_who_wants_to_load_waits_for_another_process_that_prepares(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gives up halfway, and the one that waited makes the rest; who comes later finds it done."""
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    monkeypatch.setattr("moespeq.prepare.prepare._LOOK_EVERY_S", 0.01)
    said, is_waiting = [], threading.Event()

    class Waiting:
        def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
            said.append(what)
            is_waiting.set()

    def wait_for_the_other() -> None:
        other.start()
        assert is_waiting.wait(30)
        raise InterruptError("Ctrl-C")

    found: list[Path] = []
    other = threading.Thread(target=lambda: found.append(prepare_cached(source, device="cpu", progress=Waiting())))
    with pytest.raises(InterruptError):
        prepare_cached(source, device="cpu", progress=Stopper(8, wait_for_the_other))
    other.join()
    assert said[0] == "waiting for another process that prepares it"
    assert files_of(found[0]) == whole
    assert prepare_cached(source, device="cpu") == found[0]


def test_other_options_do_not_continue_a_partial_store(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InterruptError):
        prepare_store(source, tmp_path / "store", progress=Stopper(8, interrupt))
    with pytest.raises(StoreError, match="with other options"):
        prepare_store(source, tmp_path / "store", layout=Layout.PLAIN)


def test_a_full_disk_is_explained_and_made_good(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written_bytes = os.write, 0

    def fill_up(fd: int, data: memoryview) -> int:
        nonlocal written_bytes
        written_bytes += len(data)
        if written_bytes > 200_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill_up)
        with pytest.raises(StorageError, match=r"is full: .* are still needed and .* are free"):
            prepare_store(source, tmp_path / "store")
    assert files_of(prepare_store(source, tmp_path / "store")) == whole
