"""Which tokens the KV cache holds, so that a text that begins with them need not be prefilled again.

Owns the list of tokens below the live end and who computed them; the loop owns the passes. Invariant: position i of the
cache holds the target's key and value of token i behind exactly the tokens before it. A key that a verify wrote may
differ in its last bit from the one that a prefill would write, and so may a prefill's whose chunks lay elsewhere. Hence
two ways to reuse:

- "prompt": whole chunks from position 0 on that a prefill wrote, and nothing else; those of earlier texts come out of
  the prefix cache. The text is the one that a prefill of everything gives, bit for bit.
- "history": all that is shared, decoded answers too. The text is a function of the calls there were, the same for
  every k, memory and link; that of a prefill of everything is as close as two passes of different shape are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from moespeq.errors import UsageError

__all__ = ["LiveTokens", "Reuse", "check_reuse"]

Reuse = Literal["nothing", "prompt", "history"]
"""What of earlier texts' keys and values a new one may begin with."""


def check_reuse(reuse: str) -> None:
    """Raise UsageError for anything but a Reuse."""
    if reuse not in get_args(Reuse):
        raise UsageError(f"reuse must be 'nothing', 'prompt' or 'history', got {reuse!r}.")


class LiveTokens:
    """Mutable: `cut` before a pass writes, an `add` when it has. chunk_rows: of a whole prefill chunk."""

    def __init__(self, chunk_rows: int) -> None:
        self._chunk_rows = chunk_rows
        self._tokens: list[int] = []
        self._chunked_tok = 0  # tokens of the whole chunks at the front that a prefill wrote

    def __len__(self) -> int:
        return len(self._tokens)

    def reusable_tok(self, prompt: Sequence[int], reuse: Reuse) -> int:
        """How many tokens at the front of `prompt` need no prefill; never all, for the last one gives the logits."""
        shared_tok = self._shared_tok(prompt)
        match reuse:
            case "nothing":
                return 0
            case "prompt":
                return min(shared_tok, self._chunked_tok) // self._chunk_rows * self._chunk_rows
            case "history":
                return shared_tok

    @property
    def tokens(self) -> Sequence[int]:
        """All of them."""
        return tuple(self._tokens)

    @property
    def chunked(self) -> Sequence[int]:
        """The tokens of the whole chunks at the front that a prefill wrote."""
        return self._tokens[: self._chunked_tok]

    def cut(self, num_tok: int) -> None:
        """Forget all but the first `num_tok` tokens: what follows is about to be written over."""
        assert num_tok <= len(self._tokens), f"{num_tok} of {len(self._tokens)} tokens"
        del self._tokens[num_tok:]
        self._chunked_tok = min(self._chunked_tok, num_tok // self._chunk_rows * self._chunk_rows)

    def add_prefilled(self, tokens: Sequence[int]) -> None:
        """A prefill wrote these, in chunks that begin with the first of them."""
        if self._chunked_tok == len(self._tokens):
            self._chunked_tok += len(tokens) // self._chunk_rows * self._chunk_rows
        self._tokens.extend(tokens)

    def add_decoded(self, tokens: Sequence[int]) -> None:
        """Verify passes wrote these."""
        self._tokens.extend(tokens)

    def _shared_tok(self, prompt: Sequence[int]) -> int:
        most = min(len(self._tokens), len(prompt) - 1)
        return next((place for place in range(most) if self._tokens[place] != prompt[place]), max(most, 0))
