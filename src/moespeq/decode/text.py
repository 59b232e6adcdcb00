"""Text out of tokens as they arrive, cut before the first stop text.

Owns incremental detokenization and the search for stop texts. What is handed out is never taken back: bytes
that may still become a character and characters that may still become a stop are held. Tokens are taken one
by one, so that the caller learns after which one a stop was complete: later tokens of the same round are
never live.

A decoder must not rewrite earlier text when a token is added (no clean-up of spaces); those of byte-level
BPE, byte fallback and sentencepiece tokenizers do not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from moespeq.errors import UsageError

__all__ = ["Decoder", "StreamDelta", "TextStream", "text_stream"]

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


class Decoder(Protocol):
    """The one method of a tokenizer that is needed; both `tokenizers` and transformers have it."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """New text, how many of the pushed tokens it took, and whether the last of them completed a stop text."""

    text: str
    num_tokens: int
    stopped: bool


def text_stream(decoder: Decoder | None, stop: Sequence[str], *, hidden: Collection[int]) -> TextStream:
    """Of a generation without special tokens. Raises UsageError for a stop text that no tokenizer can find."""
    if decoder is None and stop:
        raise UsageError("Stop texts are found by the tokenizer and this checkpoint has none; use eos_token_ids.")
    return TextStream(decoder or _NoText(), stop, hidden=hidden)


class TextStream:
    """One generation's text. `push` until it reports `stopped` or tokens end, then `flush`.

    hidden: tokens that have no text, as those that end it; not all of them are special to every tokenizer.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        hidden: Collection[int] = (),
    ) -> None:
        self._hidden = frozenset(hidden)
        self._detokenizer = _Detokenizer(decoder, skip_special_tokens)
        self._scanner = _StopScanner(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._scanner.stopped

    def push(self, tokens: Sequence[int]) -> StreamDelta:
        """Take committed tokens; those behind a completed stop are not taken."""
        assert not self.stopped, "tokens after a stop are never live"
        parts = []
        for num_tokens, token in enumerate(tokens, start=1):
            if token not in self._hidden:
                parts.append(self._scanner.add(self._detokenizer.add(token)))
            if self.stopped:
                return StreamDelta("".join(parts), num_tokens, True)
        return StreamDelta("".join(parts), len(tokens), False)

    def flush(self) -> str:
        """What was held back, now that no token follows; nothing after a stop."""
        if self.stopped:
            return ""
        return self._scanner.add(self._detokenizer.flush()) + self._scanner.flush()


class _NoText:
    """Stands in for a tokenizer where the checkpoint has none: tokens in, tokens out, no text."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return ""


class _Detokenizer:
    """Decodes a short window: a token needs its neighbours, since some decoders strip a leading space.

    The window is `num_context` tokens whose text is out, then pending ones. It moves on only where its text
    ends in a whole character, which is a boundary of both tokens and characters.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._shown = ""  # text of the window that is out

    def add(self, token: int) -> str:
        """Text that `token` settled."""
        self._window.append(token)
        text = self._decode(self._window)
        settled = text.rstrip(_REPLACEMENT)
        if len(settled) <= len(self._shown):
            return ""
        delta = settled[len(self._shown) :]
        if settled == text:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            settled = self._decode(self._window)
        self._shown = settled
        return delta

    def flush(self) -> str:
        """Text of the pending tokens, replacement characters included."""
        text, shown = self._decode(self._window), self._shown
        pending = self._window[self._num_context :]
        self._window, self._num_context, self._shown = [], 0, ""
        if text.startswith(shown):
            return text[len(shown) :]
        return self._decode(pending)  # under byte fallback an unfinished byte spoils the context's bytes too

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens, skip_special_tokens=self._skip_special_tokens)


class _StopScanner:
    """Passes text through up to the stop that is complete first (among those, the one that began first)."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """The part of held and new text that can no longer belong to a stop."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
