"""A base for a part of the experts on a GPU: tests/integration/test_partial_bank.py says what is claimed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import open_tight, prompts
from families import make_tiny
from kernel_cases import make_layer, random_routes
from moespeq.decode.planning import needs_of
from moespeq.kernels.draft import draft_experts
from moespeq.nested import BaseFormat, Layout
from moespeq.prepare import prepare_store
from moespeq.residency import base_rows
from moespeq.store import Store

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])  # by graphs, and eagerly
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return prepare_store(make_tiny(request.param, folder / "checkpoint"), folder / "store")


def texts(store: Path, num_slots: int, part: float, **options: object) -> list[tuple[int, ...]]:
    """Greedy texts with the base of `part` of the experts resident."""
    with Store.open(store) as opened:
        needs = needs_of(opened)
    num_bases = int(part * needs.num_records)
    form = {0.0: {"records": "whole"}, 1.0: {"records": "store"}}.get(
        part, {"records": "mixed", "base_memory": num_bases * needs.base_row_bytes}
    )
    with open_tight(store, num_slots, device="cuda", **form, **options) as engine:
        assert engine.plan.num_bases == num_bases
        found = [engine.generate(prompt, max_new_tokens=24, ignore_eos=True).tokens for prompt in prompts(3)]
        engine._parts.residency.check()
    return found


def test_any_number_of_bases_gives_the_same_text(store: Path) -> None:
    plain = texts(store, 9, 1.0, k=0)
    assert texts(store, 9, 0.0, k=0) == plain
    for part in (0.1, 0.5, 0.9):
        assert texts(store, 5, part, k=0) == plain
        assert texts(store, 5, part, k=4) == plain


def test_bases_that_change_all_the_time_change_no_token(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(store, 9, 1.0, k=0)
    monkeypatch.setattr(base_rows, "_LEAD_FACTOR", 0.0)
    monkeypatch.setattr(base_rows, "_LEAD_USES", 0.0)
    monkeypatch.setattr(base_rows, "_CHANGED_PART", 0.25)
    assert texts(store, 5, 0.3, k=4) == plain


def test_a_captured_draft_follows_the_rows_as_they_change() -> None:
    layer = make_layer(((64, 96), (96, 32)), BaseFormat(4, 32, True), Layout.PLAIN, 6, device="cuda")
    hidden = torch.randn(2, 96, device="cuda").to(torch.bfloat16)
    routes, weights = random_routes(2, 3, 6, seed=0).cuda(), torch.rand(2, 3, device="cuda")
    bank = layer.bank[[4, 0, 2]]
    rows = torch.tensor([1, -1, 2, -1, 0, -1], dtype=torch.int32, device="cuda")

    def draft(routes: torch.Tensor, bank: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        return draft_experts(
            hidden, routes, weights, bank, first_row=0, rows=rows, geometry=layer.geometry, activation="silu"
        )

    draft(routes, bank, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = draft(routes, bank, rows)
    for leaves, comes in ((None, None), (2, 5), (4, 1)):
        if leaves is not None:
            row = int(rows[leaves])
            bank[row].copy_(layer.bank[comes])
            rows[leaves], rows[comes] = -1, row
        graph.replay()
        missing = torch.where(rows[routes] < 0, -1, routes)
        assert torch.equal(found, draft(missing, layer.bank, None))
