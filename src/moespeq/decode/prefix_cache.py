"""Keys and values of earlier prompts in host memory, so that a text that begins like one of them need not prefill that.

Owns the bytes and the copies; `PrefixChunks` owns which chunk is where. What is kept is what a prefill wrote, in whole
chunks from position 0 on, and it comes back to the positions it had: behind it the same passes run over the same bits,
so a text is the one without this cache. Copies go by the stream of the passes, after the pass that wrote and before the
one that reads; so neither a copy nor the next owner of a place overtakes anything.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moespeq.config import format_at_least
from moespeq.decode.prefix_chunks import PrefixChunks
from moespeq.model.passes import Runner

__all__ = ["Allocate", "PrefixCache"]

Allocate = Callable[[Sequence[int]], Tensor]
"""Host memory that the device copies fast, uint8 [the sum], of pieces that no copy crosses."""

_ALIGN_BYTES = 4096  # memory is pinned by pages


class PrefixCache:
    """Mutable, for the engine's thread. budget_bytes: 0 keeps nothing; it is taken when the first chunk is kept."""

    def __init__(self, runner: Runner, *, chunk_rows: int, budget_bytes: int, allocate: Allocate) -> None:
        self._runner, self._chunk_rows = runner, chunk_rows
        self._budget_bytes, self._allocate = budget_bytes, allocate
        self._chunks = PrefixChunks(0, chunk_rows)
        self._memory: Tensor | None = None  # uint8 [chunks, bytes of one]

    @torch.inference_mode()
    def restore(self, prompt: Sequence[int], live_tok: int) -> int:
        """Copy what is kept of `prompt` behind its `live_tok` live tokens back; returns how many are live then.

        A row always remains to be prefilled, for the last one gives the logits.
        """
        whole_tok = (len(prompt) - 1) // self._chunk_rows * self._chunk_rows
        places = self._chunks.find(prompt[:whole_tok])
        for index in range(live_tok // self._chunk_rows, len(places)):
            for kept, live in self._pairs(places[index], index):
                live.copy_(kept, non_blocking=True)
        return max(live_tok, len(places) * self._chunk_rows)

    @torch.inference_mode()
    def keep(self, tokens: Sequence[int]) -> None:
        """Copy what is not kept yet of `tokens`, which a prefill wrote from position 0 on; whole chunks of them."""
        self.reserve()
        for index, place in self._chunks.add(tokens):
            for kept, live in self._pairs(place, index):
                kept.copy_(live, non_blocking=True)

    def reserve(self) -> None:
        """Take the memory now, where the runner has keys and values to tell its size by; else, or again: nothing."""
        rows = list(self._rows(0)) if self._budget_bytes else []
        if not rows:
            return
        chunk_bytes = -(-sum(tensor.nbytes for tensor in rows) // _ALIGN_BYTES) * _ALIGN_BYTES
        num_chunks, self._budget_bytes = self._budget_bytes // chunk_bytes, 0
        if not num_chunks:
            told = f"The prefix cache is too small for one chunk of {self._chunk_rows} tokens, and keeps nothing; "
            warnings.warn(f"{told}give at least {format_at_least(chunk_bytes)}, or 0.", stacklevel=2)
            return
        self._memory = self._allocate([chunk_bytes] * num_chunks).view(num_chunks, chunk_bytes)
        self._chunks = PrefixChunks(num_chunks, self._chunk_rows)

    def _pairs(self, place: int, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The kept and the live tensors of a chunk: keys and values of every layer."""
        assert self._memory is not None
        begin_tok, begin = index * self._chunk_rows, 0
        for live in self._rows(begin_tok):
            kept = self._memory[place, begin : begin + live.nbytes]
            yield kept.view(live.dtype).view(live.shape), live
            begin += live.nbytes

    def _rows(self, begin_tok: int) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(self._runner.kv_rows(begin_tok, begin_tok + self._chunk_rows))
