"""The ablation on a real engine: every step runs, says what it did, and changes no token of its row bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moespeq.ablation import AblationRow, run_ablation
from moespeq.errors import UsageError

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
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert printed[0]["name"] == "on demand, LRU"
    assert len({tuple(row["tokens"]) for row in printed[1:]}) == 1
