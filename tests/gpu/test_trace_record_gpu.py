"""A recording on a GPU: graphs draft along the text, and routers look ahead beside the kernels of a prefill."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import open_tight, prompts
from families import ON_A_GPU, make_tiny
from moespeq.decode.recording import record
from moespeq.model.families import why_not_traced
from moespeq.prepare import prepare_store
from moespeq.replay import RoutingTrace

pytestmark = pytest.mark.gpu

(PROMPT,) = prompts(1)
NUM_TOK = 50  # two windows of 33 rows


@pytest.fixture(scope="module", params=[name for name in ON_A_GPU if why_not_traced(name) is None])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return prepare_store(make_tiny(request.param, folder / "checkpoint"), folder / "store")


def recorded(store: Path, k: int) -> RoutingTrace:
    with open_tight(store, 9, device="cuda", k=k) as engine:
        before = engine.generate(PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True).tokens
        trace = record(engine, PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True).trace
        assert tuple(position.token for position in trace.positions) == before
        assert engine.generate(PROMPT, max_new_tokens=NUM_TOK, ignore_eos=True).tokens == before
    return trace


def test_a_trace_is_the_same_for_every_k(store: Path) -> None:
    plain, drafted = recorded(store, 0), recorded(store, 8)
    assert plain.positions == drafted.positions
    assert [position.step for position in plain.positions] == [*range(33), *range(NUM_TOK - 33)]
    assert all(len(layer) == plain.header.top_k for position in plain.positions for layer in position.ahead[1:])
    assert plain.header.link_bytes_per_s > 0
