"""The benchmarks follow the engine: a script that names what has moved fails here, not on the rented machine."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
ONLY_THERE = {"accelerate", "humming"}  # packages of the machine that is measured


@pytest.mark.parametrize("script", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_benchmark_finds_all_that_it_imports(script: str) -> None:
    try:
        importlib.import_module(script)
    except ModuleNotFoundError as error:
        if error.name not in ONLY_THERE:
            raise
        pytest.skip(f"{error.name} is not installed")
