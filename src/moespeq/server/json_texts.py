"""The texts inside of a call's JSON, in which a marker is no marker: `{"a": "</tool_call>"}`.

Whoever looks for markers must not see those, so the characters that begin one are changed there for two that stand for
no character at all, and changed back when the call is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["JsonTexts", "pieces_of"]

_HIDDEN = {"<": "\ufdd0", "[": "\ufdd1"}
_SHOW = str.maketrans({stand_in: char for char, stand_in in _HIDDEN.items()})
_PIECE = re.compile(r"[^>\]\n]*[>\]\n]|[^>\]\n]+")


def pieces_of(text: str) -> Iterator[str]:
    """`text` cut so that what follows the end of a marker comes one character first: then the marker is settled, and
    how the rest is to be read is known.
    """
    for match in _PIECE.finditer(text):
        piece = match[0]
        yield piece[:1]
        if len(piece) > 1:
            yield piece[1:]


class JsonTexts:
    """Follows one call's JSON as it comes. A text ends with its line, as JSON's do: what is no JSON hides no more."""

    def __init__(self) -> None:
        self._is_inside = False
        self._is_escaped = False

    def hide_markers(self, json: str) -> str:
        """`json` with the markers in its texts hidden."""
        return "".join(map(self._hidden, json))

    @staticmethod
    def show_markers(json: str) -> str:
        """The same with them shown."""
        return json.translate(_SHOW)

    def _hidden(self, char: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif char == '"':
            self._is_inside = not self._is_inside
        elif char == "\\":
            self._is_escaped = self._is_inside
        elif char == "\n":
            self._is_inside = False
        elif self._is_inside:
            return _HIDDEN.get(char, char)
        return char
