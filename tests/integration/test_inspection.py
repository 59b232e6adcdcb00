"""What `info` says of memory is what an engine takes, in each way that it can run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moespeq.cli.main import run
from moespeq.config import LoadOptions, format_at_least, format_bytes
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


def test_people_read_a_column_for_each_context(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["moespeq", "info", str(tiny_store)])
    with pytest.raises(SystemExit):
        run()
    least = describe_model(tiny_store)["least_memory_bytes"]
    lines = capsys.readouterr().out.splitlines()
    words = ("with the whole draft", "without (the base travels, k = 0)", "on demand")
    for device, name in (("cpu", "CPU"), ("cuda", "GPU")):
        at = lines.index(next(line for line in lines if line.startswith(f"least memory on a {name} ")))
        assert lines[at].endswith("512 tokens")
        rows = [line.strip() for line in lines[at + 1 : at + 1 + len(words)]]
        assert [row[: len(word)] for row, word in zip(rows, words, strict=True)] == [*words]
        shown = [row[len(word) :].strip() for row, word in zip(rows, words, strict=True)]
        assert shown == [format_at_least(least[device]["512"][way]) for way in WAYS]


def test_every_size_is_shown_with_a_unit_and_no_name_twice(
    tiny_store: Path, tiny_checkpoint: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    for model in (tiny_store, tiny_checkpoint):
        facts = describe_model(model)
        shown = dict(re.split(r"  +", line, maxsplit=1) for line in cli("info", model)[1].split("\n\n")[0].splitlines())
        sizes = [value for name, value in facts.items() if "_bytes" in name and name != "least_memory_bytes"]
        assert [value for value in shown.values() if re.fullmatch(r"[\d.]+ [KMG]?i?B", value)] == [
            format_bytes(size) for size in sizes
        ]
        assert len(shown) == len(facts.keys() - {"least_memory_bytes"})
        assert not [name for name in shown if "size size" in name or "tok " in f"{name} "]


def test_the_part_of_a_checkpoints_size_stands_below_it(
    tiny_checkpoint: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    names = [re.split(r"  +", line)[0] for line in cli("info", tiny_checkpoint)[1].splitlines()]
    assert names[names.index("size") + 1] == "of that routed experts"


def test_what_on_demand_chooses_leaves_a_reason(tiny_store: Path, tiny_plain_store: Path) -> None:
    for store, expected in ((tiny_store, "whole: on demand"), (tiny_plain_store, "store: its records are plain")):
        with Store.open(store) as opened:
            options, plan = plan_of(opened, LoadOptions(device="cpu", mode="on_demand"))
        assert plan.reasons["records"].startswith(expected)
        assert plan.reasons["records"].startswith(options.records)
