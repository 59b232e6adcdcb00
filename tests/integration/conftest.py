"""One tiny model for the tests that need a whole engine, prepared once: four experts a token of 16, in 3 layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from families import make_tiny
from moespeq.cli.main import run
from moespeq.nested import Layout
from moespeq.prepare import prepare_store


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3_moe with a tokenizer; not to be changed."""
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_store(tiny_checkpoint: Path) -> Path:
    """Its store of nested records; not to be changed."""
    return prepare_store(tiny_checkpoint, tiny_checkpoint.parent / "nested")


@pytest.fixture(scope="session")
def tiny_plain_store(tiny_checkpoint: Path) -> Path:
    """Its store of plain records; not to be changed."""
    return prepare_store(tiny_checkpoint, tiny_checkpoint.parent / "plain", layout=Layout.PLAIN)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `moespeq` in this process, its cache empty: (exit code, stdout, stderr)."""
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moespeq", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call
