"""Compressed keys: whatever was drafted and rejected, and however a text was cut, a row sees the entries of the windows
before it, made of committed rows alone.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq.model.compressed_kv import CompressedKVLayer, OneTensorLayer
from moespeq.model.kv_cache import KVCursor

LENGTH, BUCKET, SIZE = 64, 48, 6
CPU = torch.device("cpu")


class Compressing:
    """A layer and a compressor: an entry is the sum of its window's rows, and of those before it if they overlap."""

    def __init__(self, window: int, *, overlaps: bool) -> None:
        self.cursor = KVCursor(CPU)
        self.layer = CompressedKVLayer(LENGTH, self.cursor, window=window, overlaps=overlaps)
        self.window, self.overlaps = window, overlaps

    def run(self, rows: list[int], start: int) -> list[int]:
        """A pass of `rows` from position `start` on; what it is given of the entries, one number each."""
        self.cursor.move(start, len(rows), BUCKET)
        values = torch.tensor(rows, dtype=torch.float64)[None, :, None].expand(1, -1, SIZE).contiguous()
        self.layer.update(values[:, None], values[:, None])
        kv, gate, position = self.layer.store_compression_weights("compressor", values, -values)
        assert torch.equal(kv, -gate)
        assert position % self.window == 0
        sums = kv.view(1, -1, self.window, SIZE).sum(2)
        if self.overlaps:
            assert self.layer.update_overlap_state("compressor", None, None, SIZE) == (None, None)
            sums[:, 1:] += kv.view(1, -1, self.window, SIZE).sum(2)[:, :-1]
        seen = self.layer.update_compressor_states("compressor", sums)
        assert (seen == seen[..., :1]).all()
        return [int(entry) for entry in seen[0, :, 0]]

    def expected(self, text: list[int]) -> list[int]:
        """The entries of a text."""
        ends = range(self.window, len(text) + 1, self.window)
        back = 2 * self.window if self.overlaps else self.window
        return [sum(text[max(end - back, 0) : end]) for end in ends]


kinds = pytest.mark.parametrize(("window", "overlaps"), [(4, True), (8, False), (5, True)])


@kinds
@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(1, 99), min_size=1, max_size=12),
    rounds=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), max_size=5),
)
def test_rejected_rows_leave_nothing(
    window: int, overlaps: bool, prompt: list[int], rounds: list[tuple[int, int]]
) -> None:
    model, text = Compressing(window, overlaps=overlaps), list(prompt)
    model.run(text, 0)
    for num_drafted, accepted in rounds:
        drafted = [1000 + step for step in range(num_drafted)]
        for step, token in enumerate(drafted):  # a draft writes first
            model.run([token], len(text) + step)
        committed = [7 + step for step in range(min(accepted, num_drafted - 1) + 1)]
        padded = committed + [5000] * (8 - len(committed))
        visible = model.run(padded, len(text))
        text += committed
        expected = model.expected(text)
        assert visible[: len(expected)] == expected
    position = len(text)
    text.append(3)
    assert model.run([3], position) == model.expected(text), "a row alone is given what it may see and no more"


@kinds
@given(cuts=st.sets(st.integers(1, 23), max_size=4))
@settings(max_examples=30, deadline=None)
def test_the_cuts_of_a_text_do_not_matter(window: int, overlaps: bool, cuts: set[int]) -> None:
    model, text = Compressing(window, overlaps=overlaps), list(range(1, 25))
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        seen = model.run(text[begin:end], begin)
    expected = model.expected(text)
    assert seen[: len(expected)] == expected


@kinds
@pytest.mark.parametrize("cut", [16, 19])
def test_places_copied_into_another_cache_bring_their_entries(window: int, overlaps: bool, cut: int) -> None:
    text = list(range(1, 25))
    first, second = Compressing(window, overlaps=overlaps), Compressing(window, overlaps=overlaps)
    first.run(text, 0)
    second.run([99] * 3, 0)
    for ours, theirs in zip(second.layer.storage, first.layer.storage, strict=True):
        ours[..., :cut, :].copy_(theirs[..., :cut, :])
    seen = second.run(text[cut:], cut)
    expected = second.expected(text)
    assert seen[: len(expected)] == expected


def test_bytes_grow_with_positions_alone() -> None:
    model = Compressing(4, overlaps=True)
    model.run([1], 0)
    stored = sum(tensor.nbytes for tensor in model.layer.storage)
    assert stored == LENGTH * 8 * (SIZE + 2 * SIZE + 2), "keys, what entries are made of, a quarter of an entry (6 / 4)"
    model.run(list(range(40)), 1)
    assert sum(tensor.nbytes for tensor in model.layer.storage) == stored


def test_values_that_are_the_keys_take_no_place() -> None:
    cursor = KVCursor(CPU)
    layer = OneTensorLayer(LENGTH, cursor)
    cursor.move(2, 1, 8)
    rows = torch.ones(1, 1, 1, SIZE)
    keys, values = layer.update(rows, rows)
    assert keys.shape == (1, 1, 8, SIZE)
    assert keys.data_ptr() == values.data_ptr()
    assert [tensor.shape[2] for tensor in layer.storage] == [LENGTH]
