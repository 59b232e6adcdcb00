"""What a new text may begin with of the last one's keys and values."""

from __future__ import annotations

import pytest

from moespeq.decode.live_tokens import LiveTokens, check_reuse
from moespeq.errors import UsageError

CHUNK = 4


def prefilled(num_tok: int) -> LiveTokens:
    live = LiveTokens(CHUNK)
    live.add_prefilled(range(num_tok))
    return live


def test_an_empty_cache_offers_nothing() -> None:
    assert LiveTokens(CHUNK).reusable_tok([1, 2, 3], "history") == 0
    assert LiveTokens(CHUNK).reusable_tok([1, 2, 3], "prompt") == 0


def test_nothing_is_reused_where_nothing_is_asked_for() -> None:
    assert prefilled(8).reusable_tok(list(range(10)), "nothing") == 0


def test_history_is_all_that_is_shared_up_to_the_first_difference() -> None:
    live = prefilled(6)
    live.add_decoded([6, 7])
    assert live.reusable_tok(list(range(12)), "history") == 8
    assert live.reusable_tok([0, 1, 2, 9, 4, 5, 6, 7, 8], "history") == 3
    assert live.reusable_tok([9], "history") == 0


@pytest.mark.parametrize("num_tok", [1, 2, 4, 5, 8])
def test_the_last_token_of_a_prompt_is_never_reused(num_tok: int) -> None:
    assert prefilled(8).reusable_tok(list(range(num_tok)), "history") == num_tok - 1


def test_a_prompt_is_reused_in_whole_chunks_that_a_prefill_wrote() -> None:
    live = prefilled(10)  # two chunks and two rows
    live.add_decoded([10, 11, 12, 13, 14])
    prompt = list(range(20))
    assert live.reusable_tok(prompt, "prompt") == 8
    assert live.reusable_tok([*prompt[:7], 99, 99], "prompt") == 4
    assert live.reusable_tok(prompt[:8], "prompt") == 4, "a row must remain to be prefilled"


def test_chunks_behind_decoded_tokens_are_not_those_of_a_prefill_from_the_start() -> None:
    live = prefilled(4)
    live.add_decoded([4, 5, 6, 7])
    live.add_prefilled(range(8, 16))
    assert live.reusable_tok(list(range(30)), "prompt") == 4
    assert live.reusable_tok(list(range(30)), "history") == 16


def test_chunks_go_on_where_whole_ones_ended() -> None:
    live = prefilled(10)
    live.cut(live.reusable_tok(list(range(12)), "prompt"))
    live.add_prefilled(range(8, 17))
    assert live.reusable_tok(list(range(30)), "prompt") == 16


def test_what_was_cut_is_gone_and_so_is_the_chunk_it_was_cut_from() -> None:
    live = prefilled(8)
    live.cut(6)
    live.add_decoded([6, 7])
    assert len(live) == 8
    assert live.reusable_tok(list(range(9)), "prompt") == 4


def test_an_unknown_kind_of_reuse_is_refused() -> None:
    with pytest.raises(UsageError, match="'nothing', 'prompt' or 'history', got 'all'"):
        check_reuse("all")
