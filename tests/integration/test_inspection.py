"""What `info` says of memory is what an engine takes, in each way that it can run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moespeq.cli.main import run
from moespeq.config import LoadOptions, format_at_least
from moespeq.decode.assembly import open_engine
from moespeq.decode.planning import plan_of
from moespeq.errors import BudgetError
from moespeq.inspection import describe_model
from moespeq.store import Store

WAYS: dict[str, dict[str, Any]] = {
    "with_draft": {"k": 4, "records": "store"},
    "base_travels": {"k": 0, "records": "whole"},
    "on_demand": {"mode": "on_demand"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["nested", "plain"])
def test_the_least_memory_of_each_way_is_enough_and_one_byte_less_is_not(
    way: str, kind: str, tiny_store: Path, tiny_plain_store: Path
) -> None:
    store = tiny_store if kind == "nested" else tiny_plain_store
    least_bytes = describe_model(store)["least_memory_bytes"]["cpu"]["512"][way]
    given = {"device": "cpu", "ctx_size": 512, **WAYS[way]}
    with open_engine(store, LoadOptions(device_memory=least_bytes, **given)) as engine:
        assert engine.plan.num_slots == 1
        assert len(engine.generate([5, 6], max_new_tokens=2, ignore_eos=True).tokens) == 2
    with Store.open(store) as opened, pytest.raises(BudgetError, match="is 1 B too small"):
        plan_of(opened, LoadOptions(device_memory=least_bytes - 1, **given))


def test_a_gpu_needs_its_context_and_graphs_too(tiny_store: Path) -> None:
    least = describe_model(tiny_store)["least_memory_bytes"]
    assert set(least["cuda"]) == {"512"}, "this model's context is no longer"
    assert all(least["cuda"]["512"][way] > least["cpu"]["512"][way] + (880 << 20) for way in WAYS)


def test_people_read_a_line_for_each_context(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moespeq", "info", str(tiny_store)])
    with pytest.raises(SystemExit):
        run()
    sizes = describe_model(tiny_store)["least_memory_bytes"]["cpu"]["512"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "least memory on a CPU"
    assert lines[-3].split(maxsplit=3)[:3] == ["at", "512", "tok"]
    assert lines[-3].endswith(
        f"{format_at_least(sizes['with_draft'])} with the whole draft, "
        f"{format_at_least(sizes['base_travels'])} without (the base travels, k = 0), "
        f"{format_at_least(sizes['on_demand'])} on demand"
    )


def test_what_on_demand_chooses_leaves_a_reason(tiny_store: Path, tiny_plain_store: Path) -> None:
    for store, expected in ((tiny_store, "whole: on demand"), (tiny_plain_store, "store: its records are plain")):
        with Store.open(store) as opened:
            options, plan = plan_of(opened, LoadOptions(device="cpu", mode="on_demand"))
        assert plan.reasons["records"].startswith(expected)
        assert plan.reasons["records"].startswith(options.records)
