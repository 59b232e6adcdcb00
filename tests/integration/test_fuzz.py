"""A short run of the fuzzer on every parser of untrusted bytes.

tests/fuzz/parsers.py says what it looks for, docs/lab-notes.md what long runs found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parents[1] / "fuzz" / "parsers.py"
NUM_CASES = 2000


def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="the fuzzer is not installed: it has wheels for Linux on x86-64 only")
    done = subprocess.run(
        [sys.executable, str(FUZZER), "each", f"-runs={NUM_CASES}", "-seed=1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"stat::number_of_executed_units: {NUM_CASES}" in done.stderr
