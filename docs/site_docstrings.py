"""How docstrings become paragraphs: a line `name: meaning` of ours is an item of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["NamedLines"]

_NAMED = re.compile(r"\n(?=\S)([a-z]\w*(?:, [a-z]\w*)*): ")


class NamedLines(griffe.Extension):
    """Makes the items."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _NAMED.sub(r"\n\n- `\1`: ", obj.docstring.value)
