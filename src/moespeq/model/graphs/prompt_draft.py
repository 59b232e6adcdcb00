"""What a prompt will ask for: a draft over its first rows, before the target sees it.

It writes keys and values that the target then writes again. A prefill is bound by the link, so what matters is to name
records early: eager, this pass would take as long to launch as all slots take to fill. So it is a few graphs, cut where
a layer's routes are known, more rows than there are tokens, the last of them repeated.

Shapes: T rows, L MoE layers, K experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moespeq.buckets import PROMPT_DRAFT_ROWS
from moespeq.model.graphs.attention import attention_of_any_shape
from moespeq.model.graphs.capture import GraphPool, PieceRecorder
from moespeq.model.graphs.compiled import eager_layers
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.static_pass import LayerExperts
from moespeq.model.graphs.static_rows import StaticRows
from moespeq.model.passes import OnLayer

__all__ = ["PromptDraft"]

_LAYERS_A_PIECE = 8  # one layer's records keep the link busy for longer than these take


class PromptDraft:
    """One set of pieces for each length bucket, captured when it is first needed. `experts` are the draft's.

    spare_place: of the cache, where rows without a token write.
    """

    def __init__(
        self,
        forward: Forward,
        pool: GraphPool,
        experts: LayerExperts,
        *,
        num_layers: int,
        top_k: int,
        spare_place: int,
        device: torch.device,
    ) -> None:
        self._forward, self._pool, self._experts, self._spare_place = forward, pool, experts, spare_place
        self._inputs = StaticRows(PROMPT_DRAFT_ROWS, device)
        self._routes = torch.zeros(num_layers, PROMPT_DRAFT_ROWS, top_k, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.current_stream(device)
        self._ends = [*range(1, num_layers, _LAYERS_A_PIECE), num_layers]  # layers whose routes a piece makes known
        self._known = [torch.cuda.Event() for _ in self._ends]
        self._sets: dict[int, Sequence[torch.cuda.CUDAGraph]] = {}

    def capture(self, bucket: int) -> Sequence[torch.cuda.CUDAGraph]:
        """The pieces for `bucket`. The first time it also runs once; no sequence has begun then."""
        if not self._sets:
            self._inputs.fill([0], self._spare_place, spare_place=self._spare_place)
            self._pool.warm_up(lambda: self._run(bucket, None))
        self._sets[bucket] = self._pool.capture(lambda recorder: self._run(bucket, recorder))
        return self._sets[bucket]

    def run(self, tokens: Sequence[int], start: int, bucket: int, on_layer: OnLayer) -> None:
        """See Runner.foresee; the rows' last place lies inside `bucket`."""
        pieces = self._sets.get(bucket) or self.capture(bucket)
        rows = min(len(tokens), PROMPT_DRAFT_ROWS)
        self._inputs.fill(tokens[:rows], start, spare_place=self._spare_place)
        for piece, known in zip(pieces, self._known, strict=True):
            piece.replay()
            known.record(self._stream)
        told = 0
        for known, end in zip(self._known, self._ends, strict=True):
            known.synchronize()
            for layer in range(told, end):
                on_layer(layer, self._routes[layer, :rows].tolist())
            told = end

    def _run(self, bucket: int, recorder: PieceRecorder | None) -> None:
        def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
            self._routes[layer].copy_(routes, non_blocking=True)
            if recorder is not None and layer + 1 in self._ends[:-1]:
                recorder.cut()
            return self._experts(layer, hidden, routes, weights)

        rows = self._inputs
        with eager_layers(), attention_of_any_shape():
            self._forward(rows.tokens, rows.seen, rows.written, bucket, experts, num_logits=1)
