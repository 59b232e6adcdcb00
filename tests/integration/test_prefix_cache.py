"""Prompts that begin like earlier ones: their chunks come back from host memory, and no bit of a text changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import open_tight, prompts
from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.decode.prefix_cache import PrefixCache
from moespeq.errors import BudgetError
from moespeq.model.runner import EagerRunner

NUM_SLOTS, CHUNK = 12, 16
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.1, "seed": 5, "ignore_eos": True}
ANN, BOB = prompts(2, length=40)
MORE = prompts(2, length=20, seed=9)


def opened(store: Path, prefix_cache: int = 1 << 20, **options: Any) -> Engine:
    return open_tight(
        store, NUM_SLOTS, ctx_size=320, prefix_cache=prefix_cache, **{"k": 4, "prefill_rows": CHUNK, **options}
    )


@pytest.fixture(scope="module")
def plain(tiny_store: Path) -> Iterator[Engine]:
    """Without a prefix cache."""
    with opened(tiny_store, 0) as engine:
        yield engine


@pytest.fixture
def engine(tiny_store: Path) -> Iterator[Engine]:
    with opened(tiny_store) as one:
        yield one


def cache_of(engine: Engine) -> PrefixCache:
    return engine._parts.loop._prefixes


def chunk_bytes(engine: Engine) -> int:
    memory = cache_of(engine)._memory
    assert memory is not None
    return memory.shape[1]


@pytest.mark.parametrize(("k", "sampling"), [(0, GREEDY), (4, SAMPLED)])
def test_interleaved_conversations_say_what_each_says_alone(
    tiny_store: Path, plain: Engine, sampling: dict[str, Any], k: Any
) -> None:
    with opened(tiny_store, k=k) as engine:
        said, reused_tok = {"ann": list(ANN), "bob": list(BOB)}, []
        for turn in range(2):
            for who, tokens in said.items():
                answer = engine.generate(tokens, reuse="prompt", **sampling)
                assert answer.tokens == plain.generate(tokens, **sampling).tokens, (who, turn)
                reused_tok.append(answer.stats.reused_tok)
                said[who] = [*tokens, *answer.tokens, *MORE[turn]]
        chunks = cache_of(engine)._chunks
        chunks.check()
    assert reused_tok == [0, 0, 32, 32]  # whole chunks of the prompt before


def test_keys_that_come_back_are_those_of_a_fresh_prefill(engine: Engine) -> None:
    def keys() -> list[Any]:
        runner = engine._parts.runner
        assert isinstance(runner, EagerRunner)
        return [tensor.clone() for layer in runner.kv_rows(0, len(ANN)) for tensor in layer]

    engine.generate(ANN, reuse="prompt", **GREEDY)
    fresh = keys()
    engine.generate(BOB, reuse="prompt", **GREEDY)
    assert engine.generate(ANN, reuse="prompt", **GREEDY).stats.reused_tok == 32
    assert all(bool((one == other).all()) for one, other in zip(fresh, keys(), strict=True))


def test_a_chunk_that_left_is_prefilled_again(tiny_store: Path, engine: Engine, plain: Engine) -> None:
    engine.generate(ANN, reuse="prompt", **GREEDY)
    with opened(tiny_store, 3 * chunk_bytes(engine)) as small:
        for prompt in (ANN, BOB, ANN, BOB):
            answer = small.generate(prompt, reuse="prompt", **SAMPLED)
            assert answer.tokens == plain.generate(prompt, **SAMPLED).tokens
        assert answer.stats.reused_tok == CHUNK, "one of Bob's two chunks had to leave for Ann's"
        cache_of(small)._chunks.check()


def test_a_prefill_that_was_left_keeps_its_chunks_and_spoils_nothing(engine: Engine, plain: Engine) -> None:
    stream = engine.stream(ANN, reuse="prompt", **GREEDY)
    assert next(stream).tokens == (), "a piece without tokens, where the caller may leave"
    stream.close()
    engine.generate(BOB, **GREEDY)
    again = engine.generate(ANN, reuse="prompt", **GREEDY)
    assert (again.tokens, again.stats.reused_tok) == (plain.generate(ANN, **GREEDY).tokens, CHUNK)


def test_a_fault_in_a_prefill_keeps_the_chunks_before_it(
    engine: Engine, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = EagerRunner.prefill

    def failing(self: EagerRunner, tokens: Any, start: int, **how: Any) -> Any:
        logits = honest(self, tokens, start, **how)
        if start == CHUNK:
            with torch.inference_mode():
                for live in itertools.chain(*self.kv_rows(0, 2 * CHUNK)):
                    live.fill_(float("nan"))
            raise RuntimeError("a pass failed")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(EagerRunner, "prefill", failing)
        with pytest.raises(RuntimeError, match="a pass failed"):
            engine.generate(ANN, reuse="prompt", **GREEDY)
    again = engine.generate(ANN, reuse="prompt", **GREEDY)
    assert (again.tokens, again.stats.reused_tok) == (plain.generate(ANN, **GREEDY).tokens, CHUNK)


def test_decoded_tokens_are_never_kept(engine: Engine) -> None:
    answer = engine.generate(ANN, reuse="prompt", **{**GREEDY, "max_new_tokens": 30})
    engine.generate([*ANN, *answer.tokens], reuse="history", **GREEDY)
    engine.generate(BOB, **GREEDY)
    assert engine.generate([*ANN, *answer.tokens], reuse="prompt", **GREEDY).stats.reused_tok == 32


def test_what_only_the_last_text_holds_is_kept_with_the_rest(engine: Engine) -> None:
    engine.generate(ANN, **GREEDY)  # keeps nothing in host memory
    engine.generate([*ANN, *MORE[0]], reuse="prompt", **GREEDY)
    engine.generate(BOB, **GREEDY)
    assert engine.generate([*ANN, *MORE[0]], reuse="prompt", **GREEDY).stats.reused_tok == 48


def test_a_cache_that_holds_no_chunk_says_so_once(tiny_store: Path) -> None:
    with opened(tiny_store, 100) as engine:
        with pytest.warns(UserWarning, match=r"too small for one chunk of 16 tokens.*at least .* KiB, or 0"):
            engine.generate(ANN, reuse="prompt", **GREEDY)
        assert engine.generate(ANN, reuse="prompt", **GREEDY).stats.reused_tok == 32, "the live ones are still there"


def test_a_cache_larger_than_the_free_memory_is_refused(tiny_store: Path) -> None:
    with pytest.raises(BudgetError, match=r"prefix cache of 4096.00 TiB does not fit .* lower --prefix-cache"):
        open_engine(tiny_store, LoadOptions(device="cpu", prefix_cache=1 << 52))


def test_the_plan_counts_its_bytes(engine: Engine, plain: Engine) -> None:
    assert (engine.plan.prefix_bytes, plain.plan.prefix_bytes) == (1 << 20, 0)
