"""A text's tokens as rows to be prefilled: what each is known by, and where its chunks end.

A row of an image is known by the image and its place in it, not by its token, which all images share; so what is kept
of earlier texts fits a text only where their images are the same. An image is never cut: its rows look at each other in
some models, and the forward takes it whole. A chunk that would cut one ends in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moespeq.model.images import PlacedImage

__all__ = ["Chunk", "PromptRows"]

_MOST_ROWS_BITS = 32


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one pass. known: what they are known by; images: those in them."""

    start: int
    tokens: Sequence[int]
    known: Sequence[int]
    images: Sequence[PlacedImage]


class PromptRows:
    """first: the position of the first token."""

    def __init__(self, tokens: Sequence[int], images: Sequence[PlacedImage] = (), *, first: int = 0) -> None:
        self.tokens, self.images, self._first = tokens, images, first
        self.known: Sequence[int] = tokens
        """Of each row, what it is equal to a row of another text by: its token, or a number below zero."""
        if images:
            known = list(tokens)
            for placed in images:
                known[placed.begin : placed.end] = _numbers(placed)
            self.known = known

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self._first + len(self.tokens)

    def uncut(self, place: int) -> int:
        """`place`, or the beginning of the image that it is inside of."""
        return next((placed.begin for placed in self.images if placed.begin < place < placed.end), place)

    def chunks(self, start: int, most_rows: int) -> Iterator[Chunk]:
        """All rows from position `start` on; no image is longer than `most_rows`."""
        while start < self.end:
            stop = self.uncut(min(start + most_rows, self.end))
            assert start < stop, "an image is longer than a chunk, or was entered in its middle"
            inside = [placed for placed in self.images if start <= placed.begin < stop]
            begin = start - self._first
            yield Chunk(start, self.tokens[begin : stop - self._first], self.known[begin : stop - self._first], inside)
            start = stop


def _numbers(placed: PlacedImage) -> list[int]:
    image = int.from_bytes(placed.image.digest) << _MOST_ROWS_BITS
    return [-1 - image - row for row in range(placed.image.num_tok)]
