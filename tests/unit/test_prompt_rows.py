"""Chunks of a prompt never cut an image, and a row of an image is known by that image and its place in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moespeq.decode.prompt_rows import PromptRows
from moespeq.model.images import PlacedImage, PreparedImage

TEXT, IMAGE = 5, 9


def _image(num_tok: int, digest: bytes = b"a" * 32) -> PreparedImage:
    return PreparedImage({}, "", num_tok, digest)


def _rows(num_tok: int, *spans: tuple[int, int], digest: bytes = b"a" * 32) -> PromptRows:
    images = [PlacedImage(begin, _image(end - begin, digest)) for begin, end in spans]
    tokens = [IMAGE if any(begin <= place < end for begin, end in spans) else TEXT for place in range(num_tok)]
    return PromptRows(tokens, images)


def _borders(prompt: PromptRows, start: int, most_rows: int) -> Sequence[int]:
    chunks = list(prompt.chunks(start, most_rows))
    assert [chunk.start for chunk in chunks[1:]] == [chunk.start + len(chunk.tokens) for chunk in chunks[:-1]]
    assert [token for chunk in chunks for token in chunk.tokens] == list(prompt.tokens[start:])
    assert [image for chunk in chunks for image in chunk.images] == [one for one in prompt.images if one.end > start]
    return [chunk.start for chunk in chunks]


def test_text_is_cut_at_multiples_of_the_rows_from_where_it_begins() -> None:
    assert _borders(_rows(25), 0, 8) == [0, 8, 16, 24]
    assert _borders(_rows(25), 3, 8) == [3, 11, 19]


def test_a_chunk_ends_in_front_of_an_image_it_would_cut() -> None:
    assert _borders(_rows(25, (6, 12)), 0, 8) == [0, 6, 14, 22]
    assert _borders(_rows(25, (8, 16)), 0, 8) == [0, 8, 16, 24]
    assert _borders(_rows(9, (0, 8)), 0, 8) == [0, 8]


def test_no_image_is_cut_wherever_it_lies() -> None:
    for begin, length, most_rows in itertools.product(range(20), range(1, 9), (8, 9, 13)):
        prompt = _rows(40, (begin, begin + length), (begin + length + 1, begin + length + 4))
        borders = _borders(prompt, 0, most_rows)
        assert all(prompt.uncut(border) == border for border in borders)
        assert max(b - a for a, b in itertools.pairwise([*borders, 40])) <= most_rows


def test_rows_of_text_are_known_by_their_tokens_and_those_of_an_image_by_it() -> None:
    prompt = _rows(10, (3, 6))
    known = list(prompt.known)
    assert known[:3] + known[6:] == [TEXT] * 7
    assert len(set(known[3:6])) == 3
    assert all(number < 0 for number in known[3:6])


def test_another_image_shares_no_row_and_the_same_one_all() -> None:
    ours, same, other = (_rows(10, (3, 6), digest=digest * 32) for digest in (b"a", b"a", b"b"))
    assert list(ours.tokens) == list(other.tokens)
    assert ours.known == same.known
    assert not set(ours.known[3:6]) & set(other.known[3:6])


def test_rows_behind_a_text_are_counted_from_its_end() -> None:
    behind = PromptRows([TEXT] * 5, first=20)
    assert [(chunk.start, len(chunk.tokens)) for chunk in behind.chunks(20, 3)] == [(20, 3), (23, 2)]
    assert behind.end == 25
