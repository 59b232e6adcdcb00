"""Which prefill chunks of earlier prompts are kept, and in which place: the books of the prefix cache, without bytes.

A chunk is known by its own tokens and by all before it, compared exactly: its key holds the number of the chunk in
front, and a number is never given twice. Who was used least recently leaves first. A use counts for a chunk and then
for those in front of it, so no chunk leaves before all behind it have left.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["PrefixChunks"]

_Key = tuple[int, tuple[int, ...]]
_FRONT = 0  # the number in the key of a text's first chunk


@dataclass(frozen=True, slots=True)
class _Kept:
    number: int
    place: int


class PrefixChunks:
    """Mutable. `num_places` chunks of `chunk_rows` tokens each; of a text's tokens, whole chunks count."""

    def __init__(self, num_places: int, chunk_rows: int) -> None:
        self._chunk_rows = chunk_rows
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()  # the least recently used first
        self._free = list(reversed(range(num_places)))
        self._numbers = itertools.count(_FRONT + 1)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Places of the chunks that `tokens` begin with, in order, up to the first that is not kept; a use of them."""
        path = self._path(tokens)
        self._use(path)
        return [self._kept[key].place for key in path]

    def add(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Keep all chunks of `tokens`: (index, place) of those that were not, to be filled. A use of all of them.

        A text does not drive its own chunks out: where it is longer than all places, its end is not kept.
        """
        path, added = self._path(tokens), []
        self._use(path)
        for index, chunk in list(enumerate(self._chunks(tokens)))[len(path) :]:
            place = self._take_place(path)
            if place is None:
                break
            key = (self._number(path), chunk)
            self._kept[key] = _Kept(next(self._numbers), place)
            path.append(key)
            added.append((index, place))
        self._use(path)
        return added

    def check(self) -> None:
        """Places are held once, and every chunk but a first has the one in front of it, used no earlier."""
        places = [kept.place for kept in self._kept.values()] + self._free
        assert len(set(places)) == len(places), places
        still_behind = {kept.number for kept in self._kept.values()} | {_FRONT}
        for (front, _), kept in self._kept.items():
            assert front in still_behind, "a chunk outlived the one in front of it"
            still_behind.discard(kept.number)

    def _path(self, tokens: Sequence[int]) -> list[_Key]:
        path: list[_Key] = []
        for chunk in self._chunks(tokens):
            key = (self._number(path), chunk)
            if key not in self._kept:
                break
            path.append(key)
        return path

    def _number(self, path: list[_Key]) -> int:
        return self._kept[path[-1]].number if path else _FRONT

    def _chunks(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for begin in range(0, len(tokens) - self._chunk_rows + 1, self._chunk_rows):
            yield tuple(tokens[begin : begin + self._chunk_rows])

    def _use(self, path: list[_Key]) -> None:
        for key in reversed(path):
            self._kept.move_to_end(key)

    def _take_place(self, path: list[_Key]) -> int | None:
        if self._free:
            return self._free.pop()
        victim = next(iter(self._kept), None)
        if victim is None or victim in path:
            return None
        return self._kept.pop(victim).place
