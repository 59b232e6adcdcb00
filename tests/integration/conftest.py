"""One tiny model for the tests that need a whole engine, prepared once: four experts a token of 16, in 3 layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moespeq
from families import make_tiny
from moespeq.cli.main import run
from moespeq.decode.engine import Engine
from moespeq.nested import Layout
from moespeq.prepare import prepare_store
from served import Client, chat_model, serve


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


@pytest.fixture(scope="module")
def served_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The demo model with a chat template and a small context, as `serve` loads it."""
    folder = chat_model(tmp_path_factory.mktemp("served") / "demo")
    with moespeq.load(folder, ctx_size=128, k=4, prefill_rows=512) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(served_engine: Engine) -> Iterator[Client]:
    """Of a server of it, in this process."""
    with serve(served_engine) as opened:
        yield opened
