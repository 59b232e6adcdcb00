"""A prompt that begins like an earlier one says how much was cached, and its answer is the one without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import moespeq
from served import MODEL, Client, chat_model, serve

CHUNK = 16
ANN = [{"role": "user", "content": "Ann has 7 pens and buys 4 more pens. She gives 2 of them away."}]
BOB = [{"role": "user", "content": "Bob has 9 cards and loses 3 cards. Then he finds 5 cards more."}]
MORE = {"role": "user", "content": "How many are left?"}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server whose chunks are short."""
    folder = chat_model(tmp_path_factory.mktemp("prefixes") / "demo")
    with (
        moespeq.load(folder, ctx_size=256, k=4, prefill_rows=CHUNK, prefix_cache="4MiB") as engine,
        serve(engine) as client,
    ):
        yield client


def answer(client: Client, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": messages, "max_completion_tokens": 6, "temperature": 0.9, "seed": 3} | body
    return dict(client.post("/v1/chat/completions", **asked).json())


def cached_tok(answered: dict[str, Any]) -> int:
    return int(answered["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_second_turn_reuses_the_first_ones_prompt_between_other_conversations(cached: Client) -> None:
    engine = cached.service.worker.engine
    for begin in (ANN, BOB):
        assert cached_tok(answer(cached, begin)) < CHUNK * 2, "what templates and words happen to share"
    for begin in (ANN, BOB):
        first = answer(cached, begin)["choices"][0]["message"]["content"]
        turn = [*begin, {"role": "assistant", "content": first}, MORE]
        second = answer(cached, turn)
        assert cached_tok(second) == len(engine.tokenizer.encode_chat(begin)) // CHUNK * CHUNK
        said = engine.chat(turn, max_new_tokens=6, temperature=0.9, seed=3)
        assert second["choices"][0]["message"]["content"] == said.text


def test_metrics_count_looked_up_and_cached_tokens(cached: Client) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = [cached.metric(name) for name in names]
    usage = answer(cached, ANN)["usage"]
    queries, hits = (cached.metric(name) - earlier for name, earlier in zip(names, before, strict=True))
    assert (queries, hits) == (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    assert hits > 0


def test_further_choices_begin_with_the_prompt_of_the_first(cached: Client) -> None:
    prompt = "Question: Cleo has 8 books. She reads 3 of them and buys 6 more books at the market.\nAnswer:"
    hits = cached.metric("prefix_cache_hits_total")
    whole = cached.complete(prompt, n=3, max_tokens=4)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cached.metric("prefix_cache_hits_total") - hits == 2 * (whole["usage"]["prompt_tokens"] // CHUNK * CHUNK)
