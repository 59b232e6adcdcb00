"""The ablation on a real engine: every step runs, says what it did, and changes no token of its row bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines import memory_for
from moespeq.ablation import AblationRow, run_ablation, run_policies
from moespeq.errors import UsageError
from moespeq.nested import Layout
from moespeq.prepare import prepare_cached

COMMON = {"device_memory": "64MiB", "ctx_size": 128}
PROMPT = "What a draft predicts"


@pytest.fixture(scope="module")
def rows(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AblationRow]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESPEQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        return list(run_ablation(tiny_checkpoint, PROMPT, k=4, max_new_tokens=24, common=COMMON))


def test_each_step_adds_one_thing(rows: list[AblationRow]) -> None:
    names = [row.step.name for row in rows]
    assert names == ["on demand, LRU", "+ INT4 draft", "+ prefetch", "+ governor", "+ nested records"]
    on_demand, draft, prefetch, governor, nested = (row.result.stats for row in rows)
    assert set(on_demand.k_per_round) == {0}
    assert max(draft.k_per_round) == max(prefetch.k_per_round) == 4
    assert not {"prefetch", "stage", "saturate"} & set(draft.bytes_by_cause)
    assert len(set(governor.k_per_round)) > 1
    assert nested.rows == governor.rows > 1


def test_steps_of_one_row_bucket_give_one_text(rows: list[AblationRow]) -> None:
    assert len({row.result.tokens for row in rows[1:]}) == 1


def test_shares_are_shares_of_one_whole(rows: list[AblationRow]) -> None:
    for row in rows:
        shares = row.shares
        assert shares["hits"] + shares["late"] + shares["misses"] == pytest.approx(1.0)
        assert all(0.0 <= share <= 1.0 for share in shares.values())
        assert row.seconds_per_tok > 0


def test_policies_change_bytes_and_no_token_and_none_beats_the_bound(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    store = prepare_cached(tiny_checkpoint, layout=Layout.FIXED, device="cpu")
    common = {**COMMON, "device_memory": memory_for(store, 5, ctx_size=128)}
    found = run_policies(tiny_checkpoint, PROMPT, k=4, max_new_tokens=24, common=common)
    assert [row.step.name for row in found.rows] == ["ours", "LRU", "LFU", "chunk plan"]
    assert len({row.result.tokens for row in found.rows}) == 1
    assert {k for row in found.rows for k in row.result.stats.k_per_round[:-1]} == {4}
    assert len({row.bytes_per_tok for row in found.rows}) > 1, "policies that move the same are one policy"
    assert found.bounds.belady <= min(row.bytes_per_tok for row in found.rows)
    assert found.bounds.belady < found.bounds.no_cache


def test_on_a_cpu_a_store_has_only_one_record_form(tiny_store: Path) -> None:
    with pytest.raises(UsageError, match="needs the checkpoint for two"):
        list(run_ablation(tiny_store, PROMPT, k=4, max_new_tokens=4, common={**COMMON, "device": "cpu"}))


def test_what_a_step_cannot_be_asked_is_said_before_any_ran(tiny_checkpoint: Path) -> None:
    begun: list[str] = []
    with pytest.raises(UsageError, match="k=999 needs 1000 rows"):
        list(run_ablation(tiny_checkpoint, PROMPT, k=999, max_new_tokens=4, common=COMMON, on_step=begun.append))
    assert begun == []


def test_the_command_prints_one_object(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moespeq.cli.main import app

    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path))
    arguments = [str(tiny_checkpoint), "-p", PROMPT, "-n", "6", "--k", "2", "--device-memory", "64MiB", "--json"]
    app(["ablation", *arguments], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    rows, policies = printed["rows"], printed["policies"]
    assert rows[0]["name"] == "on demand, LRU"
    assert [row["name"] for row in policies] == ["ours", "LRU", "LFU", "chunk plan"]
    assert len({tuple(row["tokens"]) for row in [*rows[1:], *policies]}) == 1
    assert set(printed["bound_bytes_per_tok"]) == {"no_cache", "belady"}
