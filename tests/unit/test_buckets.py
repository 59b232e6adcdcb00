"""Length buckets depend on the position only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq.buckets import LengthBuckets


@given(position=st.integers(0, 20_000), contexts=st.tuples(st.integers(1, 30_000), st.integers(1, 30_000)))
def test_bucket_is_the_same_for_every_context_that_holds_the_position(position: int, contexts: tuple[int, int]) -> None:
    lengths = {LengthBuckets(context).above(position) for context in contexts if context > position}
    assert len(lengths) <= 1
    assert all(length > position for length in lengths)


def test_edges_double_to_4096_and_then_go_on_in_steps_of_4096() -> None:
    buckets = LengthBuckets(9000)
    assert [buckets.above(p) for p in (0, 255, 256, 2047, 4095, 4096, 8192)] == [256, 256, 512, 2048, 4096, 8192, 12288]
    assert buckets.longest == 12288


def test_length_at_which_the_model_changes_is_an_edge() -> None:
    buckets = LengthBuckets(2000, switch_lengths=(700, 5000, 0))
    assert buckets.above(600) == 700
    assert buckets.above(700) == 1024
    assert buckets.longest == 2048


@given(context=st.integers(1, 20_000), rows=st.sampled_from((1, 17, 33, 65)))
def test_storage_holds_every_bucket_and_a_verify_pass_at_the_context_end(context: int, rows: int) -> None:
    buckets = LengthBuckets(context)
    stored = buckets.storage_tok(context, rows)
    assert stored >= buckets.longest
    assert stored >= context - 1 + rows
