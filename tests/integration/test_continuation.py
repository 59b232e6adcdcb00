"""A text that begins like the last one: only what is new is prefilled, and the text stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import open_tight, prompts
from families import make_tiny
from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.errors import UsageError
from moespeq.model.runner import EagerRunner
from moespeq.prepare import prepare_store

NUM_SLOTS, NUM_TOKENS, CHUNK = 12, 20, 16
GREEDY: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
FIRST, SECOND = prompts(2, length=40)


def opened(store: Path, **options: Any) -> Engine:
    return open_tight(store, NUM_SLOTS, ctx_size=320, **{"k": 4, "prefill_rows": CHUNK, **options})


@pytest.fixture(scope="module")
def engine(tiny_store: Path) -> Iterator[Engine]:
    with opened(tiny_store) as one:
        yield one


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(start, rows) of every prefill pass from now on."""
    passes: list[tuple[int, int]] = []
    honest = EagerRunner.prefill

    def counted(self: EagerRunner, tokens: Any, start: int, **how: Any) -> Any:
        passes.append((start, len(tokens)))
        return honest(self, tokens, start, **how)

    monkeypatch.setattr(EagerRunner, "prefill", counted)
    return passes


def talk(engine: Engine, turns: int = 3, **sampling: Any) -> list[GenerationResult]:
    """A conversation of token ids: every turn's prompt is all that was said, and a few new tokens."""
    said, results = list(FIRST), []
    for turn in range(turns):
        results.append(engine.generate(said, reuse="history", **{**GREEDY, **sampling}))
        said = [*said, *results[-1].tokens, *SECOND[turn : turn + 7]]
    return results


def test_a_turn_prefills_only_what_is_new(engine: Engine, prefilled: list[tuple[int, int]]) -> None:
    engine.generate(SECOND, **GREEDY)
    prefilled.clear()
    first, second, third = talk(engine)
    per_turn = len(FIRST) + NUM_TOKENS - 1  # the key of an answer's last token is not there yet
    assert first.stats.reused_tok == 0
    assert second.stats.reused_tok == per_turn
    assert third.stats.reused_tok == per_turn + 7 + NUM_TOKENS
    assert prefilled == [(0, 16), (16, 16), (32, 8), (per_turn, 8), (third.stats.reused_tok, 8)]


def test_a_continued_conversation_says_what_one_prefilled_from_the_start_says(engine: Engine) -> None:
    continued, said = talk(engine), list(FIRST)
    for turn, result in enumerate(continued):
        assert engine.generate(said, **GREEDY).tokens == result.tokens
        said = [*said, *result.tokens, *SECOND[turn : turn + 7]]


@pytest.mark.parametrize("k", [0, 1, 8, "auto"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.1, "seed": 5, "repetition_penalty": 1.2}])
def test_a_conversation_is_the_same_for_every_k(tiny_store: Path, engine: Engine, k: Any, sampling: Any) -> None:
    engine.generate(SECOND, **GREEDY)
    expected = [result.tokens for result in talk(engine, **sampling)]
    with opened(tiny_store, k=k) as other:
        assert [result.tokens for result in talk(other, **sampling)] == expected


def test_whole_chunks_of_a_prompt_are_reused_without_changing_a_bit(
    engine: Engine, prefilled: list[tuple[int, int]]
) -> None:
    fresh = engine.generate([*FIRST, *SECOND], **GREEDY)
    engine.generate(FIRST, **GREEDY)
    prefilled.clear()
    reused = engine.generate([*FIRST, *SECOND], reuse="prompt", **GREEDY)
    assert (reused.tokens, reused.stats.reused_tok) == (fresh.tokens, 2 * CHUNK)
    assert prefilled[0] == (2 * CHUNK, CHUNK)


def test_keys_of_a_reused_prompt_are_those_of_a_fresh_one(engine: Engine) -> None:
    def keys() -> list[Any]:
        runner = engine._parts.runner
        assert isinstance(runner, EagerRunner)
        num_tok = len(FIRST) + len(SECOND)
        return [layer.keys[:, :, :num_tok].clone() for layer in runner._cache.layers]

    engine.generate([*FIRST, *SECOND], **GREEDY)
    fresh = keys()
    engine.generate(FIRST, **GREEDY)
    engine.generate([*FIRST, *SECOND], reuse="prompt", **GREEDY)
    assert all(bool((one == other).all()) for one, other in zip(fresh, keys(), strict=True))


def test_a_cancelled_answer_goes_on_where_it_stopped(engine: Engine) -> None:
    whole = engine.generate(FIRST, **GREEDY).tokens
    stream = engine.stream(FIRST, **GREEDY)
    num_tok = 0
    for piece in stream:
        num_tok += len(piece.tokens)
        if num_tok > 1:
            stream.cancel()
    kept = stream.result.tokens
    assert 1 < len(kept) < NUM_TOKENS
    rest = engine.generate([*FIRST, *kept], reuse="history", **{**GREEDY, "max_new_tokens": NUM_TOKENS - len(kept)})
    assert rest.stats.reused_tok == len(FIRST) + len(kept) - 1
    assert (*kept, *rest.tokens) == whole


def fail_once(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a pass failed")

    with patch.context() as patched:
        patched.setattr(EagerRunner, "verify", failing)
        with pytest.raises(RuntimeError, match="a pass failed"):
            engine.generate(FIRST, **GREEDY)


@pytest.mark.parametrize(
    "spoil",
    [lambda engine, patch: engine.prompt_logits(SECOND), fail_once, lambda engine, patch: watched(engine)],
    ids=["other passes", "a failed pass", "an observer's passes"],
)
def test_nothing_is_reused_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Engine, pytest.MonkeyPatch], None]
) -> None:
    fresh = engine.generate(FIRST, **GREEDY).tokens
    spoil(engine, monkeypatch)
    after = engine.generate(FIRST, reuse="history", **GREEDY)
    assert (after.tokens, after.stats.reused_tok) == (fresh, 0)


class Watcher:
    """An observer whose passes write over the text."""

    def hear_prompt(self, resident: Any) -> None: ...

    def hear_commit(self, position: int, routes: Any, times: Any) -> None: ...

    def follow(self, loop: Any, sampler: Any, tokens: Any) -> Iterator[None]:
        yield from loop.look_ahead(SECOND[:8], 0, lambda layer, rows: None)


def watched(engine: Engine) -> None:
    for _ in engine.stream(FIRST, observer=Watcher(), **GREEDY):
        pass


def test_an_unknown_kind_of_reuse_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="reuse must be"):
        engine.stream(FIRST, reuse="everything")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def store_with_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_next")
    return prepare_store(make_tiny("qwen3_next", folder / "checkpoint"), folder / "store")


def test_layers_with_a_state_go_on_behind_the_last_text(store_with_states: Path) -> None:
    conversations = []
    for k in (0, 4):
        with opened(store_with_states, k=k) as engine:
            turns = talk(engine)
            assert [turn.stats.reused_tok > 0 for turn in turns] == [False, True, True]
            conversations.append([turn.tokens for turn in turns])
    assert conversations[0] == conversations[1]


def test_layers_with_a_state_begin_anew_where_none_was_kept(store_with_states: Path) -> None:
    with opened(store_with_states, prefix_cache=1 << 20) as engine:
        fresh = engine.generate(SECOND, **GREEDY)
        engine.generate([*FIRST, *SECOND], **GREEDY)
        for reuse in ("history", "prompt"):  # the last text shares forty tokens, and no state of theirs
            again = engine.generate([*FIRST, 7], reuse=reuse, **GREEDY)
            assert again.stats.reused_tok == 0
            assert again.tokens == engine.generate([*FIRST, 7], **GREEDY).tokens
        assert engine.generate(SECOND, **GREEDY).tokens == fresh.tokens
