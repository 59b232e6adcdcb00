"""Runs `prepare` or `export` again and again and kills each at a step chosen at random.

    python tests/killed_runs.py prepare|export SOURCE OUT NUM_POINTS      prints the steps at which it killed

A step is whatever touches the disk: a file opened, written (half of the bytes, where the kill is there), synced, cut,
renamed, removed; and every report of progress. Imports once, then forks for each run, before any thread exists that a
fork could break. What is true after each kill is for the caller to say: what there is moves from OUT to OUT-STEP.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moespeq.prepare import export_checkpoint, prepare, prepare_store

_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.symlink"})


class Killer:
    """Counts steps, and kills its own process at step `at`; at 0 never."""

    def __init__(self, at: int) -> None:
        self._at, self.count = at, 0

    def install(self) -> None:
        os.write, os.fsync = self._around(os.write), self._around(os.fsync)
        sys.addaudithook(self._hear)

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """A progress sink."""
        self._step()

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS:
            self._step()

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, *data: memoryview) -> Any:
            if data and self.count + 1 == self._at:
                call(fd, data[0][: len(data[0]) // 2])
            self._step()
            return call(fd, *data)

        return counted


def run_once(what: str, source: Path, out: Path, at: int) -> int:
    """In a child: returns the number of steps of a run that ends, -1 for one that was killed."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        killer = Killer(at)
        killer.install()
        if what == "prepare":
            prepare_store(source, out, device="cpu", progress=killer)
        else:
            export_checkpoint(source, out, progress=killer)
        steps = killer.count
        os.writev(write_fd, [str(steps).encode()])
        os._exit(0)
    os.close(write_fd)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    steps = os.read(read_fd, 20)
    os.close(read_fd)
    assert status in (0, -signal.SIGKILL), status
    return int(steps) if status == 0 else -1


def main(what: str, source: Path, out: Path, num_points: int) -> None:
    prepare.COMMIT_BYTES = 60_000
    num_steps = run_once(what, source, out, 0)
    shutil.rmtree(out)
    for at in random.Random(7).sample(range(1, num_steps + 1), num_points):
        assert run_once(what, source, out, at) == -1, (at, num_steps)
        for place in (out, out.with_name(f"{out.name}.partial")):
            if place.exists():
                place.rename(place.with_name(place.name.replace(out.name, f"{out.name}-{at}", 1)))
        print(at, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
