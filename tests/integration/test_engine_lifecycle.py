"""Whatever ends a generation, a cancel, a close, an error or a disk, the engine is free again and answers as before."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moespeq
from engines import open_tight
from moespeq.decode.engine import Engine
from moespeq.decode.loop import SpeculativeLoop
from moespeq.errors import BudgetError, MoespeqError, PromptError, UsageError
from moespeq.model.weights import ExpertWeights
from moespeq.types import FinishReason

NUM_SLOTS = 12
PROMPT = "What a draft predicts"


@pytest.fixture(scope="module")
def engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, NUM_SLOTS, k=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def answer(engine: Engine) -> tuple[int, ...]:
    return text(engine)


@pytest.fixture(autouse=True)
def _engine_is_free_and_answers_as_before(engine: Engine, answer: tuple[int, ...]) -> Iterator[None]:
    yield
    assert text(engine) == answer
    engine._parts.residency.check()


def text(engine: Engine, **sampling: Any) -> tuple[int, ...]:
    return engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True, **sampling).tokens


def test_a_cancelled_stream_ends_after_its_round_and_says_so(engine: Engine, answer: tuple[int, ...]) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=400, ignore_eos=True)
    next(stream)
    stream.cancel()
    assert [piece for piece in stream if piece.tokens] == []
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert stream.result.tokens == answer[:1]


def test_another_thread_may_cancel(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=400, ignore_eos=True)
    next(stream)
    canceller = threading.Thread(target=stream.cancel)
    canceller.start()
    num_pieces = sum(1 for _ in stream)
    canceller.join()
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert num_pieces < 400


def test_a_stream_closed_early_frees_the_engine(engine: Engine, answer: tuple[int, ...]) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=400)
    next(stream)
    stream.close()
    stream.close()
    assert text(engine) == answer
    assert list(stream) == []


def test_a_stream_dropped_early_frees_the_engine(engine: Engine, answer: tuple[int, ...]) -> None:
    for _ in engine.stream(PROMPT, max_new_tokens=400):
        break
    assert text(engine) == answer


def test_a_stream_never_begun_does_not_hold_the_engine(engine: Engine, answer: tuple[int, ...]) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=400)
    assert text(engine) == answer
    stream.close()


def test_a_second_generation_is_refused_while_one_runs(engine: Engine) -> None:
    first = engine.stream(PROMPT, max_new_tokens=400)
    next(first)
    for second in (
        lambda: engine.generate(PROMPT),
        lambda: next(engine.stream(PROMPT)),
        lambda: engine.prompt_logits(PROMPT),
    ):
        with pytest.raises(UsageError, match="generating already, one sequence at a time"):
            second()
    next(first)  # and the first goes on
    first.close()


def test_an_error_of_the_callers_processor_passes_through(engine: Engine) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 20:
            raise ZeroDivisionError("the caller's own")
        return scores

    with pytest.raises(ZeroDivisionError):
        text(engine, logits_processors=broken)


def test_an_interrupt_during_a_round_is_raised_after_it_and_a_cancelled_result_remains(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=20, ignore_eos=True)
    tokens = list(next(stream).tokens)
    with pytest.MonkeyPatch.context() as patch:
        propose = SpeculativeLoop.propose

        def interrupted(self: SpeculativeLoop, *args: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return propose(self, *args)

        patch.setattr(SpeculativeLoop, "propose", interrupted)
        tokens += next(stream).tokens
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    stream.cancel()
    assert list(stream) == []
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert list(stream.result.tokens) == tokens


def test_a_prompt_that_is_neither_text_nor_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptError, match="text or a list of token ids, got int"):
        engine.generate(5)  # type: ignore[arg-type]


def test_an_interrupt_in_a_round_leaves_nothing_open(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ExpertWeights, "exact", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text(engine)


def test_a_closed_engine_refuses_politely(tiny_store: Path) -> None:
    with open_tight(tiny_store, NUM_SLOTS) as engine:
        stream = engine.stream(PROMPT, max_new_tokens=400)
        next(stream)
    with pytest.raises(UsageError, match="closed before this generation ended"):
        next(stream)
    engine.close()
    with pytest.raises(UsageError, match="The engine is closed; load it again"):
        text(engine)
    with pytest.raises(UsageError, match="The engine is closed"):
        engine.prompt_logits(PROMPT)


def test_closing_while_another_thread_generates_ends_that_generation(tiny_store: Path) -> None:
    engine, begun, reasons = open_tight(tiny_store, NUM_SLOTS, k=0), threading.Event(), []

    def generate() -> None:
        stream = engine.stream(PROMPT, max_new_tokens=400, ignore_eos=True)
        with suppress(UsageError):  # raised where the engine closed between two rounds
            for _ in stream:
                begun.set()
            reasons.append(stream.result.finish_reason)

    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait()
    engine.close()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert reasons in ([FinishReason.CANCELLED], [])


def test_closing_from_inside_a_round_cancels_and_releases_at_the_end(tiny_store: Path) -> None:
    before = threading.active_count()
    engine = open_tight(tiny_store, NUM_SLOTS, k=0)

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.close()
        return scores

    results: list[Any] = []
    generate = partial(engine.generate, PROMPT, max_new_tokens=400, ignore_eos=True, logits_processors=close)
    thread = threading.Thread(target=lambda: results.append(generate()), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert results[0].finish_reason is FinishReason.CANCELLED
    assert threading.active_count() == before
    with pytest.raises(UsageError, match="The engine is closed"):
        text(engine)


def test_closing_during_a_round_does_not_wait_for_a_stream_nobody_iterates_on(tiny_store: Path) -> None:
    engine = open_tight(tiny_store, NUM_SLOTS, k=0)
    closer = threading.Thread(target=engine.close, daemon=True)

    def close(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        closer.start()
        closer.join(timeout=0.2)  # it has seen the round, and waits
        return scores

    stream = engine.stream(PROMPT, max_new_tokens=400, ignore_eos=True, logits_processors=close)
    next(stream)
    closer.join(timeout=60)
    assert not closer.is_alive()
    with pytest.raises(UsageError, match="closed before this generation ended"):
        next(stream)


def test_an_engine_closed_while_it_is_claimed_does_not_run(tiny_store: Path) -> None:
    engine = open_tight(tiny_store, NUM_SLOTS)

    class ClosesFirst:
        def __init__(self, lock: Any) -> None:
            self.lock, self.release = lock, lock.release

        def acquire(self, *, blocking: bool) -> bool:
            engine._is_closed = True
            return bool(self.lock.acquire(blocking=blocking))

    engine._busy = ClosesFirst(engine._busy)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="The engine is closed"):
        engine.prompt_logits(PROMPT)


def test_an_engine_that_is_dropped_without_a_close_leaves_no_thread_and_no_file(tiny_store: Path) -> None:
    open_tight(tiny_store, NUM_SLOTS).close()
    gc.collect()
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(2):
        text(open_tight(tiny_store, NUM_SLOTS))
    gc.collect()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208


@pytest.mark.parametrize("max_new_tokens", range(6, 10))  # the last round with a draft and without
def test_a_dropped_engine_is_gone_at_once_without_the_garbage_collector(tiny_store: Path, max_new_tokens: int) -> None:
    engine = open_tight(tiny_store, 5, device="cpu", k=4)
    engine.generate(PROMPT, max_new_tokens=max_new_tokens, ignore_eos=True)
    parts = engine._parts
    left = [weakref.ref(part) for part in (parts.residency, parts.runner, parts.runner.model, parts.loop)]
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del engine, parts
        assert [part() for part in left] == [None] * 4  # on a GPU they hold its memory
    finally:
        gc.enable()


def test_no_thread_outlives_its_engine(tiny_store: Path) -> None:
    before = threading.active_count()
    with open_tight(tiny_store, NUM_SLOTS, link_threads=3):
        assert threading.active_count() == before + 3
    assert threading.active_count() == before


def test_load_takes_a_store_or_a_checkpoint_and_prepares_it_once(
    tiny_store: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, ...]
) -> None:
    monkeypatch.setenv("MOESPEQ_CACHE", str(tmp_path / "cache"))
    with moespeq.load(tiny_store, device_memory="64MiB", k=4) as from_store:
        assert text(from_store) == answer
    with moespeq.load(str(tiny_checkpoint), k=4) as from_checkpoint:
        assert text(from_checkpoint) == answer
    (made,) = (tmp_path / "cache").iterdir()
    made_at = (made / "experts.bin").stat().st_mtime_ns
    moespeq.load(tiny_checkpoint).close()
    assert (made / "experts.bin").stat().st_mtime_ns == made_at
    with pytest.raises(UsageError, match="Did you mean 'ctx_size'"):
        moespeq.load(tiny_store, ctx_sise=100)


def test_a_retuned_engine_gives_the_same_text_from_cold_slots(tiny_store: Path) -> None:
    with open_tight(tiny_store, 12, k=4) as engine:
        before = engine.generate(PROMPT, max_new_tokens=12)
        engine.retune(k=0, prefetch=False, eviction="lru", link_bytes_per_s="1GB")
        after = engine.generate(PROMPT, max_new_tokens=12)
        assert after.tokens == before.tokens
        assert set(after.stats.k_per_round) == {0}
        assert engine.options.eviction == "lru"
        engine.retune(k=4, link_bytes_per_s=None)
        assert set(engine.generate(PROMPT, max_new_tokens=12).stats.k_per_round) != {0}


def test_what_takes_memory_cannot_be_retuned(tiny_store: Path) -> None:
    with open_tight(tiny_store, 12, k=4) as engine:
        with pytest.raises(UsageError, match="'rows' is fixed when an engine is loaded"):
            engine.retune(rows=33)
        with pytest.raises(UsageError, match=r"Unknown option 'prefetc'\. Did you mean 'prefetch'"):
            engine.retune(prefetc=False)
        with pytest.raises(UsageError, match="k=17 needs 18 rows"):
            engine.retune(k=17)
        assert engine.options.k == 4


def test_a_device_out_of_memory_in_a_round_is_a_sentence_and_the_next_answer_works(
    engine: Engine, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(engine._parts.runner, "verify", exhausted)
        with pytest.raises(BudgetError, match="ran out of memory in the middle of an answer"):
            text(engine)
    assert text(engine) == answer


def test_nan_of_a_failed_answer_does_not_stay_in_the_cache(
    engine: Engine, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine._parts.runner
    honest = runner.verify

    def poisoned(*args: Any) -> torch.Tensor:
        logits = honest(*args)
        with torch.inference_mode():
            for layer in runner._cache.layers:
                layer.values.fill_(torch.nan)
        return torch.full_like(logits, torch.nan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "verify", poisoned)
        with pytest.raises(MoespeqError, match="produced NaN"):
            text(engine)
    assert text(engine) == answer
