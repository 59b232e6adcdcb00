"""Length buckets: how many positions of the cache a pass looks over, as a function of position only; and the rows of
passes whose graphs are captured ahead.

A token is computed over the same length whatever round it falls into and whatever the context was asked to be; a round
is cut before its bucket would change. Where a model switches its rotary embedding at a length (long-rope), that length
is an edge too.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PROMPT_DRAFT_ROWS", "PROMPT_ROWS", "LengthBuckets"]

PROMPT_DRAFT_ROWS = 128
"""How many rows of a prompt are drafted: more name few new experts, and each routed pair reads a base once more."""

PROMPT_ROWS = (128, 256, 512)
"""Rows of the prefills whose graphs are captured at load: each looks as far as an eager one of as many tokens."""

_SMALLEST_TOK = 256
_LARGEST_STEP_TOK = 4096


class LengthBuckets:
    """Edges 256, 512, 1024, 2048, 4096, then every 4096, and any length at which the model itself changes."""

    def __init__(self, context_tok: int, switch_lengths: Sequence[int] = ()) -> None:
        edges = {length for length in switch_lengths if 0 < length < context_tok}
        edge = _SMALLEST_TOK
        while edge < context_tok:
            edges.add(edge)
            edge += min(edge, _LARGEST_STEP_TOK)
        edges.add(edge)
        self._edges = sorted(edges)

    @property
    def longest(self) -> int:
        """The last edge: the first that holds the whole context."""
        return self._edges[-1]

    @property
    def count(self) -> int:
        """How many different lengths there are."""
        return len(self._edges)

    def up_to(self, length_tok: int) -> Sequence[int]:
        """The edges of at most `length_tok`, or the first one."""
        return [edge for edge in self._edges if edge <= length_tok] or self._edges[:1]

    def above(self, position: int) -> int:
        """The smallest edge above `position`."""
        for edge in self._edges:
            if edge > position:
                return edge
        raise AssertionError(f"position {position} lies past the longest bucket, {self.longest}")

    def storage_tok(self, context_tok: int, rows: int) -> int:
        """Positions a cache must have: the longest bucket, and room for a verify pass that ends at the context."""
        return max(self.longest, context_tok + rows)
