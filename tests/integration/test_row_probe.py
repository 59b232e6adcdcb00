"""A machine on which a row's bits depend on its place in a pass is recognised at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moespeq.config import LoadOptions
from moespeq.decode import planning, tier_cpu
from moespeq.decode.assembly import open_engine
from moespeq.errors import UsageError
from moespeq.model import row_probe
from moespeq.model.row_probe import rows_agree

SHAPES = [(48, 32), (32, 24)]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64)).bfloat16()


def _seamed(broken_cols: int) -> Any:
    """A product whose upper half of rows is rounded differently, for one width only."""
    linear = torch.nn.functional.linear

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = linear(rows, weight)
        if weight.shape[1] == broken_cols:
            result[len(result) // 2 :] *= 1.01
        return result

    return product


def test_rows_agree_on_one_thread() -> None:
    assert rows_agree(_model(), SHAPES, rows=17, row_tile=16)


@pytest.mark.parametrize("broken_cols", [32, 24], ids=["dense", "expert"])
def test_a_seam_between_rows_is_seen(monkeypatch: pytest.MonkeyPatch, broken_cols: int) -> None:
    monkeypatch.setattr(row_probe.F, "linear", _seamed(broken_cols))
    assert not rows_agree(_model(), SHAPES, rows=17, row_tile=16)


def test_one_row_has_no_other_place_and_keeps_its_threads(
    tiny_plain_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_cpu, "rows_agree", lambda *_, **__: False)
    before = torch.get_num_threads()
    try:
        with open_engine(tiny_plain_store, LoadOptions(threads=2, mode="on_demand")) as engine:
            assert engine.plan.threads == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_that_round_by_place_are_given_up_or_refused(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_cpu, "rows_agree", lambda *_, **__: False)
    with pytest.raises(UsageError, match=r"With 2 threads this CPU rounds a row by its place .* use threads=1"):
        open_engine(tiny_store, LoadOptions(threads=2))
    monkeypatch.setattr("moespeq.plan.threads._LEAST_WEIGHTS", 0)
    monkeypatch.setattr(planning, "physical_cores", lambda: 2)
    with open_engine(tiny_store, LoadOptions()) as engine:
        assert engine.plan.threads == torch.get_num_threads() == 1
        assert "rounds a row by its place" in engine.plan.reasons["threads"]
