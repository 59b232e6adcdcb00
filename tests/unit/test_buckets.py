"""The length a pass looks over depends on its position alone, so equal tokens are computed over equal lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq.buckets import LengthBuckets

CONTEXTS = st.integers(1, 30_000)


@settings(deadline=None, max_examples=50)
@given(position=st.integers(0, 20_000), contexts=st.tuples(CONTEXTS, CONTEXTS))
def test_bucket_is_the_same_for_every_context_that_holds_the_position(position: int, contexts: tuple[int, int]) -> None:
    lengths = {LengthBuckets(context).above(position) for context in contexts if context > position}
    assert len(lengths) <= 1
    assert all(length > position for length in lengths)


@settings(deadline=None, max_examples=50)
@given(context_tok=CONTEXTS, rows=st.integers(1, 65))
def test_every_bucket_is_stored_and_so_are_padded_rows_at_the_end_of_the_context(context_tok: int, rows: int) -> None:
    buckets = LengthBuckets(context_tok)
    stored_tok = buckets.storage_tok(context_tok, rows)
    for position in {0, context_tok // 3, context_tok - 1}:
        assert position < buckets.above(position) <= buckets.longest <= stored_tok
        assert position + rows <= stored_tok


def test_edges_double_to_4096_and_then_go_on_in_steps_of_4096() -> None:
    buckets = LengthBuckets(9000)
    assert [buckets.above(p) for p in (0, 255, 256, 2047, 4095, 4096, 8192)] == [256, 256, 512, 2048, 4096, 8192, 12288]


def test_a_length_at_which_the_model_changes_is_an_edge_only_inside_the_context() -> None:
    assert LengthBuckets(1000, [700]).above(600) == 700
    assert LengthBuckets(1000, [700]).above(700) == 1024
    assert LengthBuckets(600, [700]).above(599) == 1024


def test_a_position_past_everything_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="past the longest bucket, 1024"):
        LengthBuckets(1000).above(1024)
