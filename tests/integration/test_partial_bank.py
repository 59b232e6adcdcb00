"""A base for a part of the experts: how many there are, and whose they are, decides the time and never a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import memory_for, noisy_draft, open_tight, prompts
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.decode.planning import needs_of
from moespeq.errors import UsageError
from moespeq.residency import base_rows
from moespeq.store import Store

NUM_RECORDS = 48
PROMPT = prompts(1, length=20)[0]


def generate(engine: Engine, num_tok: int = 24) -> GenerationResult:
    result = engine.generate(PROMPT, max_new_tokens=num_tok, ignore_eos=True)
    engine._parts.residency.check()
    return result


def bases(store: Path, num_bases: int) -> int:
    """The base_memory of so many experts."""
    with Store.open(store) as opened:
        return num_bases * needs_of(opened).base_row_bytes


def open_mixed(store: Path, num_bases: int, num_slots: int, **options: object) -> Engine:
    return open_tight(store, num_slots, records="mixed", base_memory=bases(store, num_bases), **options)


@pytest.fixture(scope="module")
def answer(tiny_store: Path) -> tuple[int, ...]:
    """Greedy text of plain decoding with every base and every record resident."""
    with open_tight(tiny_store, NUM_RECORDS, k=0) as engine:
        return generate(engine).tokens


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("num_bases", [1, 24, 47])
@pytest.mark.parametrize("num_slots", [1, 7])
def test_any_number_of_bases_gives_the_same_text(
    tiny_store: Path, answer: tuple[int, ...], num_slots: int, num_bases: int, k: int
) -> None:
    with open_mixed(tiny_store, num_bases, num_slots, k=k) as engine:
        assert (engine.plan.num_bases, engine.plan.num_slots) == (num_bases, num_slots)
        assert generate(engine).tokens == answer


@pytest.mark.parametrize(("num_bases", "records"), [(0, "whole"), (NUM_RECORDS, "store")])
def test_no_base_and_all_of_it_are_the_other_two_forms(
    tiny_store: Path, answer: tuple[int, ...], num_bases: int, records: str
) -> None:
    with open_engine(tiny_store, LoadOptions(device="cpu", base_memory=bases(tiny_store, num_bases) + 99)) as engine:
        assert (engine.options.records, engine.plan.num_bases) == (records, num_bases)
        assert generate(engine).tokens == answer


@pytest.mark.parametrize(
    ("k", "records", "reason"), [("auto", "whole", "nothing is drafted"), (4, "mixed", "of the 2 of 48 experts")]
)
def test_where_the_base_does_not_fit_a_draft_has_a_part_of_it_if_it_is_asked_for(
    tiny_store: Path, answer: tuple[int, ...], k: int | str, records: str, reason: str
) -> None:
    memory = memory_for(tiny_store, 2, records="whole")
    with open_engine(tiny_store, LoadOptions(device="cpu", device_memory=memory, k=k)) as engine:
        assert engine.options.records == records
        assert f"{records}: with all of the base an engine takes at least" in engine.plan.reasons["records"]
        assert reason in engine.plan.reasons["base"]
        assert engine.plan.total_bytes <= memory
        assert generate(engine).tokens == answer


@pytest.mark.parametrize("records", ["auto", "mixed"])
def test_memory_for_less_than_one_base_is_none_and_nothing_is_drafted(records: str, tiny_store: Path) -> None:
    with open_engine(tiny_store, LoadOptions(device="cpu", base_memory=1, records=records)) as engine:
        assert (engine.options.records, engine.options.k) == ("whole", 0)


def test_a_k_without_any_base_is_refused(tiny_store: Path) -> None:
    with pytest.raises(UsageError, match=r"holds not one expert.s base of .* so k=4 has nothing to draft with"):
        open_engine(tiny_store, LoadOptions(device="cpu", base_memory=0, k=4))


def test_bases_of_experts_that_are_used_come_to_the_bank(tiny_store: Path) -> None:
    with open_mixed(tiny_store, 24, 12, k=4) as engine:
        residency = engine._parts.residency
        stats = generate(engine).stats
        score, rows = residency._frequency.score, residency._base_rows._rows
    inside = sorted(score for score, row in zip(score, rows, strict=True) if row >= 0)
    outside = sorted(score for score, row in zip(score, rows, strict=True) if row < 0)
    assert inside[len(inside) // 2] > outside[len(outside) // 2]
    assert stats.bytes_by_cause["base"] > 0
    assert stats.link_bytes == sum(stats.bytes_by_cause.values())


def test_plain_records_need_no_base_and_a_part_of_it_drafts(tiny_plain_store: Path, answer: tuple[int, ...]) -> None:
    with open_mixed(tiny_plain_store, 24, 5, k=4) as engine:
        assert generate(engine).tokens == answer
        assert "base" not in generate(engine).stats.bytes_by_cause


def test_a_host_cache_serves_records_and_their_ends(tiny_store: Path, answer: tuple[int, ...]) -> None:
    with open_mixed(tiny_store, 24, 5, k=4, host_memory=10_000_000) as engine:
        for _ in range(2):
            assert generate(engine).tokens == answer


def test_sampling_gives_the_same_text_for_every_bank(tiny_store: Path) -> None:
    def sampled(engine: Engine) -> tuple[int, ...]:
        return engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True, temperature=0.9, seed=3).tokens

    with open_tight(tiny_store, 9, k=0) as engine:
        plain = sampled(engine)
    for num_bases in (6, 40):
        with open_mixed(tiny_store, num_bases, 9, k=4) as engine:
            assert [sampled(engine) for _ in range(2)] == [plain] * 2


def test_bases_that_change_all_the_time_change_no_token(
    tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_rows, "_LEAD_FACTOR", 0.0)
    monkeypatch.setattr(base_rows, "_LEAD_USES", 0.0)
    noisy_draft(monkeypatch, tiny_store, 0.3)
    with open_mixed(tiny_store, 12, 5, k=4) as engine:
        first = list(engine._parts.residency._base_rows._rows)
        for _ in range(3):
            assert generate(engine).tokens == answer
        assert engine._parts.residency._base_rows._rows != first
