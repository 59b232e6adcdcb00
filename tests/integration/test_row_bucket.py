"""Why every verify pass has R rows: a bf16 product of one row is not that of a row among seventeen.

Seen at 1408 -> 2048 (here the attention's output projection). CPUs differ in which row counts they round alike, so the
tests run a kernel that treats one row in its own way wherever they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import open_tight, prompts
from families import make_tiny
from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine
from moespeq.prepare import prepare_store
from row_kernels import sum_one_row_in_halves

NUM_TOKENS = 24
SHAPE = {"hidden_size": 2048, "num_attention_heads": 22, "head_dim": 64, "num_hidden_layers": 2, "num_experts": 8}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    checkpoint = make_tiny("qwen3_moe", folder / "checkpoint", shard_size="1GB", **SHAPE)
    return prepare_store(checkpoint, folder / "store")


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        sum_one_row_in_halves(patch)
        yield


def text(engine: Engine) -> tuple[int, ...]:
    return engine.generate(prompts(1)[0], max_new_tokens=NUM_TOKENS, ignore_eos=True).tokens


@pytest.fixture(scope="module")
def speculative(store: Path) -> tuple[int, ...]:
    with open_tight(store, 8, k=4) as engine:
        return text(engine)


def test_the_projection_in_question_is_there(store: Path) -> None:
    with open_tight(store, 8) as engine:
        assert engine.model.model.layers[0].self_attn.o_proj.weight.shape == (2048, 1408)


def test_plain_decoding_in_the_row_bucket_gives_the_speculative_text(store: Path, speculative: tuple[int, ...]) -> None:
    """This is the test that fails when k = 0 runs with one row: the next one shows it."""
    with open_tight(store, 8, k=0) as engine:
        assert text(engine) == speculative


def test_plain_decoding_with_one_row_gives_another_text(
    store: Path, speculative: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadOptions, "row_bucket", property(lambda self: 1))
    with open_tight(store, 8, k=0) as engine:
        assert engine._parts.runner.rows == 1
        assert text(engine) != speculative
