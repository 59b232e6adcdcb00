"""Two processes at one store or one export: one does the work, the other is told so or finds it done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from families import make_tiny
from moespeq.prepare import prepare_store
from synthetic_store import files_of

# Forks two runs that begin together, once prepare and once export are imported and before any thread exists.
RACES = """
import os, sys
from pathlib import Path
from moespeq.errors import MoespeqError
from moespeq.prepare import export_checkpoint, prepare_store

source, place = Path(sys.argv[1]), Path(sys.argv[2])
works = [lambda: prepare_store(source, place / "store", device="cpu"),
         lambda: export_checkpoint(place / "store", place / "out")]
for work in works:
    ready, go = os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.close(go)
        os.read(ready, 1)
        try:
            work()
            print("done", flush=True)
        except MoespeqError as error:
            print(error, flush=True)
        os._exit(0)
    os.close(go)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


def test_of_two_that_begin_together_one_prepares_or_exports_and_the_other_is_told(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "source")
    command = [sys.executable, "-c", RACES, str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for pair, told in ((lines[:2], ("is preparing", "exists already")), (lines[2:], ("is exporting", "done"))):
        assert "done" in pair
        other = pair[1 - pair.index("done")]
        assert any(words in other for words in told), other
        assert other == "done" or str(tmp_path) in other
    whole = prepare_store(source, tmp_path / "whole" / "store", device="cpu")
    assert files_of(tmp_path / "store") == files_of(whole)
    assert files_of(tmp_path / "out") == files_of(source)
