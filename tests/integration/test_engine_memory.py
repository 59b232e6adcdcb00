"""Memory decides how much crosses the link and how long it takes, and never a token."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import memory_for, noisy_draft, open_tight, prompts
from moespeq.config import LoadOptions, format_at_least
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.decode.sampling import Sampler
from moespeq.errors import BudgetError, StorageError, UsageError
from moespeq.model.runner import EagerRunner
from moespeq.residency import Residency
from moespeq.store import DiskSource, Store
from moespeq.types import ExpertKey

NUM_RECORDS = 48
PROMPT = prompts(1, length=20)[0]


def generate(engine: Engine, num_tok: int = 12) -> GenerationResult:
    return engine.generate(PROMPT, max_new_tokens=num_tok, ignore_eos=True)


@pytest.fixture(scope="module")
def answer(tiny_store: Path) -> tuple[int, ...]:
    """Greedy text with every expert resident."""
    with open_tight(tiny_store, NUM_RECORDS, k=0) as engine:
        return generate(engine).tokens


@contextmanager
def counted_disk(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every record read from disk."""
    read, honest = [], DiskSource.read_into

    def counting(self: DiskSource, key: ExpertKey, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        read.append(self.num_bytes(key) - skip_bytes)
        honest(self, key, buffer, skip_bytes=skip_bytes)

    with patch.context() as inner:
        inner.setattr(DiskSource, "read_into", counting)
        yield read


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("num_slots", [1, 5, 47])
def test_any_number_of_slots_gives_the_same_text(
    tiny_store: Path, answer: tuple[int, ...], num_slots: int, k: int
) -> None:
    with open_tight(tiny_store, num_slots, k=k) as engine:
        assert engine.plan.num_slots == num_slots
        assert generate(engine).tokens == answer
        engine._parts.residency.check()


def test_fewer_slots_move_more_bytes_and_all_slots_move_each_record_once(tiny_store: Path) -> None:
    moved = []
    for num_slots in (4, 16, NUM_RECORDS):
        with open_tight(tiny_store, num_slots, k=4) as engine:
            generate(engine)
            moved.append(generate(engine).stats.link_bytes)
    assert moved[0] > moved[1] > moved[2]
    with Store.open(tiny_store) as store:
        all_bytes = sum(store.record_bytes(key) for key in store.keys())  # noqa: SIM118 - a Store is no mapping
    assert moved[2] <= all_bytes


def test_a_budget_below_one_slot_is_refused_before_anything_is_loaded(tiny_store: Path) -> None:
    least_bytes = memory_for(tiny_store, 1)
    with open_engine(tiny_store, LoadOptions(device_memory=least_bytes)) as engine:
        assert engine.plan.num_slots == 1
    expected = f"is 100 B too small: .* give at least {format_at_least(least_bytes)}"
    with pytest.raises(BudgetError, match=expected):
        open_engine(tiny_store, LoadOptions(device_memory=least_bytes - 100, k=4, records="store"))


def test_the_engine_takes_what_the_plan_says(tiny_store: Path) -> None:
    with open_tight(tiny_store, 7, k=4) as engine:
        generate(engine)
        parts, plan = engine._parts, engine.plan
        dense_bytes = sum(tensor.nbytes for tensor in parts.runner.model.parameters())
        assert plan.dense_bytes == dense_bytes
        assert plan.kv_bytes == parts.runner.kv_bytes
        weights = parts.runner._target.weights
        assert plan.slots_bytes == weights.slots.nbytes
        assert weights.bank is not None
        assert weights.bank.num_bytes <= plan.base_bytes


def test_a_host_cache_saves_disk_reads_and_changes_no_token(
    tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = []
    for host_memory in (0, 200_000, 10_000_000):
        with (
            counted_disk(monkeypatch) as read,
            open_tight(tiny_store, 6, k=4, host_memory=host_memory) as engine,
        ):
            result = generate(engine)
            assert result.tokens == answer
            assert sum(read) <= result.stats.link_bytes
            read_bytes.append(sum(read))
    assert read_bytes[0] > read_bytes[1] > read_bytes[2]
    with Store.open(tiny_store) as store:
        assert read_bytes[2] <= sum(store.record_bytes(key) for key in store.keys())  # noqa: SIM118


def test_bytes_that_are_reported_are_bytes_that_were_read(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_disk(monkeypatch) as read, open_tight(tiny_store, 9, k=4) as engine:
        stats = generate(engine).stats
        engine._parts.residency.settle()
    assert stats.link_bytes <= sum(read) <= stats.link_bytes + 4 * max(read)  # the rest was in flight at the end
    assert stats.link_bytes == sum(stats.bytes_by_cause.values())


def test_a_paced_link_takes_as_long_as_its_bandwidth_says(tiny_store: Path, answer: tuple[int, ...]) -> None:
    with open_tight(tiny_store, 4, k=4) as engine:
        fast = generate(engine, 4)
    bytes_per_s = 2 * fast.stats.link_bytes  # so half a second
    with open_tight(tiny_store, 4, k=4, link_bytes_per_s=float(bytes_per_s)) as engine:
        slow = generate(engine, 4)
    assert slow.tokens == fast.tokens == answer[:4]
    taken_s = slow.stats.ttft_s + slow.stats.decode_s
    assert taken_s > 0.7 * slow.stats.link_bytes / bytes_per_s
    assert slow.stats.stall_s > fast.stats.stall_s


def test_without_prefetch_only_demand_moves_records(tiny_store: Path, answer: tuple[int, ...]) -> None:
    with open_tight(tiny_store, 9, k=4, prefetch=False) as engine:
        result = generate(engine)
    assert result.tokens == answer
    assert set(result.stats.bytes_by_cause) == {"demand"}
    assert (result.stats.late, result.stats.wasted_bytes) == (0, 0)


def test_prefetch_turns_misses_into_hits(tiny_store: Path) -> None:
    misses = {}
    for prefetch in (False, True):
        with open_tight(tiny_store, 16, k=4, prefetch=prefetch) as engine:
            misses[prefetch] = generate(engine).stats.misses
    assert misses[True] < misses[False]


def test_plain_decoding_prefetches_nothing_after_prefill(tiny_store: Path) -> None:
    with open_tight(tiny_store, 9, k=0) as engine:
        stats = engine.generate([5], max_new_tokens=8, ignore_eos=True).stats
    assert set(stats.bytes_by_cause) == {"demand"}
    assert (stats.drafted, stats.routes.to_json()) == (0, {"exact": 0, "same_set": 0, "wrong": 0})


@pytest.mark.parametrize("prefill_rows", [1, 7, 20])
def test_a_prompt_in_chunks_gives_one_text_for_every_k(tiny_store: Path, prefill_rows: int) -> None:
    texts = []
    for k in (0, 4):
        with open_tight(tiny_store, 9, k=k, prefill_rows=prefill_rows) as engine:
            result = generate(engine, 10)
            assert engine.prompt_logits(PROMPT).shape[0] == len(PROMPT)
        texts.append(result.tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rows", [33, 65])
def test_every_row_bucket_keeps_the_text_for_every_k(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    noisy_draft(monkeypatch, tiny_store, 0.3)
    texts = []
    for k in (0, rows - 1):
        with open_tight(tiny_store, 12, k=k, rows=rows) as engine:
            result = generate(engine)
            assert result.stats.rows == rows
        texts.append(result.tokens)
    assert texts[0] == texts[1]


def test_an_engine_of_one_row_decodes_without_a_draft(tiny_store: Path) -> None:
    with open_tight(tiny_store, 5, device="cpu", rows=1) as engine:
        result = engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        assert (len(result.tokens), set(result.stats.k_per_round)) == (8, {0})


def test_on_demand_runs_from_plain_records_without_a_base(tiny_plain_store: Path) -> None:
    with open_tight(tiny_plain_store, 9, mode="on_demand") as engine:
        result = generate(engine)
        assert engine.plan.base_bytes == 0
        assert engine._parts.runner._target.weights.bank is None
    assert len(result.tokens) == 12
    assert (result.stats.rows, result.stats.drafted) == (1, 0)
    assert set(result.stats.bytes_by_cause) == {"demand"}


def test_on_demand_runs_from_nested_records_with_their_base_in_front(tiny_store: Path, tiny_plain_store: Path) -> None:
    with open_tight(tiny_plain_store, 9, mode="on_demand") as engine:
        plain = generate(engine)
    with open_tight(tiny_store, 9, mode="on_demand") as engine:
        whole = generate(engine)
        assert (engine.options.records, engine.plan.base_bytes) == ("whole", 0)
    assert whole.tokens == plain.tokens
    assert whole.stats.link_bytes < 0.9 * plain.stats.link_bytes


def test_without_room_for_the_base_it_travels_and_the_text_stays_plain_decodings(
    tiny_store: Path, answer: tuple[int, ...]
) -> None:
    memory = memory_for(tiny_store, 2, records="whole")
    with open_engine(tiny_store, LoadOptions(device="cpu", device_memory=memory)) as engine:
        result = generate(engine)
        assert "nothing is drafted" in engine.plan.reasons["base"]
        assert engine.plan.total_bytes <= memory
        engine._parts.residency.check()
    assert result.tokens == answer
    assert set(result.stats.k_per_round) == {0}


def test_a_draft_that_is_asked_for_and_has_no_room_for_one_base_is_refused(tiny_store: Path) -> None:
    memory = memory_for(tiny_store, 1, records="whole") + 4096
    with pytest.raises(BudgetError, match="INT4 base"):
        open_engine(tiny_store, LoadOptions(device="cpu", device_memory=memory, k=4))


def test_nested_records_alone_cannot_be_run_on_demand(tiny_store: Path) -> None:
    with pytest.raises(UsageError, match="records='whole'"):
        open_engine(tiny_store, LoadOptions(device="cpu", mode="on_demand", records="store"))


def test_plain_and_nested_records_give_one_text(tiny_plain_store: Path, answer: tuple[int, ...]) -> None:
    with open_tight(tiny_plain_store, 9, k=4) as engine:
        assert generate(engine).tokens == answer


def test_two_engines_read_one_store_at_once(tiny_store: Path, answer: tuple[int, ...]) -> None:
    with open_tight(tiny_store, 5, k=4) as first, open_tight(tiny_store, 9, k=1) as second:
        streams = [engine.stream(PROMPT, max_new_tokens=12, ignore_eos=True) for engine in (first, second)]
        texts: list[list[int]] = [[], []]
        pending: list[Any] = list(zip(texts, streams, strict=True))
        while pending:  # piece by piece in turns
            for text, stream in list(pending):
                piece = next(stream, None)
                if piece is None:
                    pending.remove((text, stream))
                else:
                    text.extend(piece.tokens)
    assert tuple(texts[0]) == tuple(texts[1]) == answer


@pytest.mark.parametrize("k", [0, 4])
def test_a_damaged_record_is_named_and_the_engine_lives_on_when_it_is_restored(
    tiny_store: Path, tmp_path: Path, answer: tuple[int, ...], k: int
) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "store")
    experts = store / "experts.bin"
    whole = experts.read_bytes()
    with open_tight(store, 12, k=k) as engine:
        damaged = bytearray(whole)
        for position in range(50, len(whole), 1000):  # every record, bases stay whole
            damaged[position] ^= 16
        experts.write_bytes(damaged)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"experts\.bin.*checksum") as caught:
                generate(engine)
            assert "\n" not in str(caught.value)
        experts.write_bytes(whole)
        assert generate(engine).tokens == answer
        engine._parts.residency.check()


@pytest.mark.parametrize("k", [0, 4])
def test_a_file_cut_while_an_engine_runs_is_named_and_the_engine_lives_on_when_it_is_restored(
    tiny_store: Path, tmp_path: Path, answer: tuple[int, ...], k: int
) -> None:
    store = shutil.copytree(tiny_store, tmp_path / "store")
    experts = store / "experts.bin"
    whole = experts.read_bytes()
    with open_tight(store, 12, k=k) as engine:
        os.truncate(experts, 5000)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"experts\.bin ends at byte .* truncated; prepare the store again"):
                generate(engine)
        experts.write_bytes(whole)
        assert generate(engine).tokens == answer
        engine._parts.residency.check()


def test_a_record_that_fails_only_as_a_guess_costs_no_token(
    tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, honest = iter(range(10**6)), DiskSource.read_into

    def flaky(self: DiskSource, key: Any, buffer: memoryview, *, skip_bytes: int = 0) -> None:
        if threading.current_thread().name.endswith("-0") and next(reads) % 3 == 2:
            raise OSError("flaky link")
        honest(self, key, buffer, skip_bytes=skip_bytes)

    monkeypatch.setattr(DiskSource, "read_into", flaky)
    with open_tight(tiny_store, 12, k=4) as engine:
        for _ in range(12):
            try:
                assert generate(engine).tokens == answer
            except StorageError as error:
                assert "flaky link" in str(error)  # noqa: PT017 - either outcome is right, a wrong text is not
            engine._parts.residency.check()


def test_no_token_is_chosen_from_a_pass_whose_records_did_not_all_arrive(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, accept = [], Sampler.accept

    def counting(self: Sampler, *arguments: Any) -> Any:
        chosen.append(accept(self, *arguments))
        return chosen[-1]

    def lost(self: Residency) -> None:
        raise StorageError("The record is gone.")

    monkeypatch.setattr(Sampler, "accept", counting)
    with open_tight(tiny_store, 5, k=4, device="cpu") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Residency, "confirm", lost)
            with pytest.raises(StorageError, match="is gone"):
                engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        assert len(chosen) == 1  # the prefill's
        assert len(engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens) == 8


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_prompt_is_foreseen_only_where_something_comes_of_it(
    prefetch: bool, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(EagerRunner, "foresees", True)
    monkeypatch.setattr(EagerRunner, "foresee", lambda self, tokens, start, on_layer: asked.append(len(tokens)))
    with open_tight(tiny_store, 5, k=4, device="cpu", prefetch=prefetch) as engine:
        engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
    assert asked == [len(PROMPT)] * prefetch
