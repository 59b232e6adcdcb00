"""The prefill of a short prompt as piecewise CUDA graphs, cut where a layer's routes are known.

A prefill is bound by the link, and launching an eager layer takes the thread that feeds the link a fifth of the time of
the layer's copies. So usual numbers of rows are captured ahead, and a prompt takes the smallest that holds it: rows
behind its tokens repeat the last one, are routed nowhere and write to a place that no token looks at.

Shapes: R rows, T of them live, K experts a row, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq.model.graphs.attention import attention_of_any_shape
from moespeq.model.graphs.capture import GraphPool, PieceRecorder
from moespeq.model.graphs.compiled import eager_layers
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.static_pass import LayerExperts
from moespeq.model.graphs.static_rows import StaticRows

__all__ = ["PromptPieces"]


@dataclass(frozen=True, slots=True)
class _Between:
    """What pieces and experts hand each other: hidden [R, H], routes and weights [R, K] to them, mixed [R, H] back."""

    hidden: Tensor
    routes: Tensor
    weights: Tensor
    mixed: Tensor

    @classmethod
    def like(cls, hidden: Tensor, routes: Tensor, weights: Tensor) -> _Between:
        return cls(
            torch.zeros_like(hidden), torch.zeros_like(routes), torch.zeros_like(weights), torch.zeros_like(hidden)
        )

    def of(self, num_rows: int) -> _Between:
        """The first `num_rows`."""
        return _Between(self.hidden[:num_rows], self.routes[:num_rows], self.weights[:num_rows], self.mixed[:num_rows])

    def take(self, hidden: Tensor, routes: Tensor, weights: Tensor) -> None:
        """Keep a layer's."""
        self.hidden.copy_(hidden)
        self.routes.copy_(routes)
        self.weights.copy_(weights)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """One captured pass; `logits` [1, V] are valid until the next replay of any graph.

    inputs and forward own memory that the graphs read: tokens and places, the columns of masks.
    """

    inputs: StaticRows
    forward: Forward
    between: _Between
    graphs: Sequence[torch.cuda.CUDAGraph]
    logits: Tensor


class PromptPieces:
    """One set of pieces for each number of rows in `buckets`, which says how far its rows look.

    forward_over: a Forward whose masks are as wide as a bucket. spare_place: of the cache, where rows without a token
    write.
    """

    def __init__(
        self,
        forward_over: Callable[[int], Forward],
        pool: GraphPool,
        buckets: Mapping[int, int],
        *,
        spare_place: int,
        device: torch.device,
    ) -> None:
        self._forward_over, self._pool, self._buckets = forward_over, pool, buckets
        self._spare_place, self._device = spare_place, device
        self._last = torch.zeros(1, dtype=torch.int64, device=device)  # the row whose logits are wanted
        self._between: _Between | None = None  # of the largest pass; the others use its first rows
        self._sets: dict[int, _Pieces] = {}

    def capture(self) -> None:
        """All sets, each of which also runs once; no sequence has begun."""
        for rows, bucket in sorted(self._buckets.items(), reverse=True):
            inputs, forward = StaticRows(rows, self._device), self._forward_over(bucket)
            inputs.fill([0], self._spare_place, spare_place=self._spare_place)
            self._pool.warm_up(lambda: self._run(forward, inputs, bucket, None))  # noqa: B023 -- runs here and now
            logits: list[Tensor] = []
            graphs = self._pool.capture(
                lambda recorder: logits.append(self._run(forward, inputs, bucket, recorder))  # noqa: B023
            )
            assert self._between is not None, "the warm-up has seen a layer"
            self._sets[rows] = _Pieces(inputs, forward, self._between.of(rows), graphs, logits[0])

    def fits(self, num_tokens: int, start: int) -> bool:
        """Whether `run` takes so many tokens from position `start` on."""
        return start == 0 and num_tokens <= max(self._sets, default=0)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], experts: LayerExperts) -> Tensor:
        """Prefill `tokens` from position 0 on; the logits of the last, [1, V]."""
        live = len(tokens)
        pieces = self._sets[min(rows for rows in self._sets if rows >= live)]
        between, own = pieces.between, pieces.between.of(live)
        pieces.inputs.fill(tokens, 0, spare_place=self._spare_place)
        self._last.fill_(live - 1)
        between.mixed.zero_()
        *before_experts, last = pieces.graphs
        for layer, graph in enumerate(before_experts):
            graph.replay()
            own.mixed.copy_(experts(layer, own.hidden, own.routes, own.weights))
        last.replay()
        return pieces.logits

    def _run(self, forward: Forward, inputs: StaticRows, bucket: int, recorder: PieceRecorder | None) -> Tensor:
        rows = len(inputs.tokens)

        def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
            self._between = self._between or _Between.like(hidden, routes, weights)
            between = self._between.of(rows)
            between.take(hidden, routes, weights)
            if recorder is not None:
                recorder.cut()
            return between.mixed

        with eager_layers(), attention_of_any_shape():
            return forward(inputs.tokens, inputs.seen, inputs.written, bucket, experts, num_logits=self._last)
