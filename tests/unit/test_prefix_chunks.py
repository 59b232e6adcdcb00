"""The books of the prefix cache: exact keys, least recently used first, and no chunk without the one before."""

from __future__ import annotations

import random

import pytest

from moespeq.decode.prefix_chunks import PrefixChunks

ROWS = 2


def text(*chunks: int) -> list[int]:
    """A text of whole chunks, each told by a number."""
    return [token for chunk in chunks for token in (chunk, chunk)]


def test_what_was_added_is_found_up_to_the_first_difference() -> None:
    chunks = PrefixChunks(8, ROWS)
    places = [place for _, place in chunks.add(text(1, 2, 3))]
    assert chunks.find(text(1, 2, 3, 4)) == places
    assert chunks.find(text(1, 2, 9, 3)) == places[:2]
    assert chunks.find(text(2, 3)) == []


def test_a_chunk_behind_another_text_is_another_chunk() -> None:
    chunks = PrefixChunks(8, ROWS)
    first, second = chunks.add(text(1, 5)), chunks.add(text(2, 5))
    assert [index for index, _ in second] == [0, 1]
    assert not {place for _, place in first} & {place for _, place in second}


def test_only_what_is_missing_is_added() -> None:
    chunks = PrefixChunks(8, ROWS)
    chunks.add(text(1, 2))
    assert [index for index, _ in chunks.add(text(1, 2, 3))] == [2]
    assert [index for index, _ in chunks.add(text(1, 4))] == [1]
    assert chunks.add(text(1, 2)) == []


def test_a_part_of_a_chunk_does_not_count() -> None:
    chunks = PrefixChunks(8, ROWS)
    assert chunks.add([1]) == []
    assert len(chunks.add([1, 1, 2])) == 1
    assert len(chunks.find([1, 1, 2])) == 1
    assert chunks.find([1]) == []


def test_who_was_used_least_recently_leaves_and_its_end_first() -> None:
    chunks = PrefixChunks(4, ROWS)
    chunks.add(text(1, 2))
    chunks.add(text(5, 6))
    chunks.find(text(1, 2))
    chunks.add(text(7))
    assert len(chunks.find(text(5, 6))) == 1
    assert len(chunks.find(text(1, 2))) == 2


def test_a_text_does_not_drive_its_own_front_out() -> None:
    chunks = PrefixChunks(2, ROWS)
    assert [index for index, _ in chunks.add(text(1, 2, 3, 4))] == [0, 1]
    assert len(chunks.find(text(1, 2, 3))) == 2


def test_without_places_nothing_is_kept() -> None:
    chunks = PrefixChunks(0, ROWS)
    assert chunks.add(text(1)) == []
    assert chunks.find(text(1)) == []


@pytest.mark.parametrize("num_places", [1, 3, 7])
def test_whatever_comes_the_books_agree_with_a_plain_dictionary_of_prefixes(num_places: int) -> None:
    chunks, draw = PrefixChunks(num_places, ROWS), random.Random(num_places)
    held: dict[int, tuple[int, ...]] = {}  # place: the text up to the end of its chunk
    for _ in range(400):
        tokens = text(*(draw.randrange(3) for _ in range(draw.randrange(6))))
        if draw.random() < 0.5:
            for index, place in chunks.add(tokens):
                held[place] = tuple(tokens[: (index + 1) * ROWS])
        for index, place in enumerate(chunks.find(tokens)):
            assert held[place] == tuple(tokens[: (index + 1) * ROWS])
        chunks.check()
        assert len(chunks) <= num_places
