"""Who looks on while one text is generated, and may run passes of its own behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from moespeq.decode.sampling import Sampler
from moespeq.decode.timeline import RoundTimes

if TYPE_CHECKING:
    from moespeq.decode.loop import SpeculativeLoop

__all__ = ["Observer"]


class Observer(Protocol):
    """Looks on while one text is generated. Without one, nothing is kept for it."""

    def hear_prompt(self, resident: Sequence[Sequence[int]]) -> None:
        """The prompt is in the cache; [layer]: the experts that have slots now."""
        ...

    def hear_commit(self, position: int, routes: Sequence[Sequence[Sequence[int]]], times: RoundTimes) -> None:
        """Rows from `position` on are committed; the target's routes, [layer][row][K], and when the round was."""
        ...

    def follow(self, loop: SpeculativeLoop, sampler: Sampler, tokens: Sequence[int]) -> Iterator[None]:
        """Passes of its own over the finished text, the prompt and `tokens`, each of which ends at a yield.

        All keys and values but the last token's are there, and the target's; a round may go on from it.
        """
        ...
