"""The verify pass as piecewise CUDA graphs, cut at every experts call.

A piece ends where a layer's routes are known: it leaves the rows' hidden state in a static tensor and copies the routes
to pinned memory. The host then leases the records, computes the layer's products wave by wave as records arrive, and
replays the next piece, which begins by combining the products; only then it tidies up and looks ahead, while the device
computes. Between two pieces the host waits once, for the routes: so everything launched before is done, and staging
memory of the previous layer is free again.

Padded rows' pairs are never computed; their products stay zero, for a NaN in a row past the live end would reach live
rows through a masked value.

Shapes: R rows, K experts a row, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moespeq.kernels.weighted_sum import weighted_sum
from moespeq.model.graphs.capture import GraphPool, PieceRecorder
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.static_rows import StaticRows

__all__ = ["LayerProducts", "VerifyPieces"]

Routes = npt.NDArray[np.int64]


class LayerProducts(Protocol):
    """Computes a layer's routed products between two pieces."""

    def approach(self, layer: int) -> None:
        """`compute` of `layer` comes next, as soon as its routes are known."""
        ...

    def compute(
        self, layer: int, routes: Routes, hidden: Tensor, products: Tensor, launch_next: Callable[[], None]
    ) -> None:
        """Launch products [R * K, H] of the live rows' `routes` [live, K], then the next piece; hidden [R, H].

        `launch_next` is called once, behind the last product; from then on `routes` may change.
        """
        ...

    def warm_up(self, hidden: Tensor, products: Tensor) -> None:
        """Compile and capture what `compute` launches; the tensors are those of every later call."""
        ...


@dataclass(frozen=True, slots=True)
class _Pieces:
    """One captured pass; `logits` [R, V] are valid until the next replay of any graph."""

    graphs: Sequence[torch.cuda.CUDAGraph]
    logits: Tensor


class VerifyPieces:
    """One set of pieces for each length bucket, captured when it is first needed."""

    def __init__(
        self,
        forward: Forward,
        pool: GraphPool,
        layers: LayerProducts,
        *,
        rows: int,
        top_k: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward, self._pool, self._layers = forward, pool, layers
        self._inputs = StaticRows(rows, device)
        self._hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self._products = torch.zeros(rows * top_k, hidden_size, dtype=dtype, device=device)
        self._routes = torch.zeros(rows, top_k, dtype=torch.int64, pin_memory=True)
        self._routes_known, self._stream = torch.cuda.Event(), torch.cuda.current_stream(device)
        self._sets: dict[int, _Pieces] = {}

    def warm_up(self, spare_place: int, bucket: int) -> None:
        """Run once without capture, at places that no sequence uses."""
        self._inputs.fill([0], spare_place)
        self._pool.warm_up(lambda: self._run(bucket, None))
        self._layers.warm_up(self._hidden, self._products)

    def verify(self, tokens: Sequence[int], position: int, bucket: int) -> Tensor:
        """See Runner.verify; the true routes go to `layers`."""
        pieces = self._sets.get(bucket) or self.capture(bucket)
        self._inputs.fill(tokens, position)
        first, *behind_experts = pieces.graphs
        live_routes = self._routes[: len(tokens)].numpy()
        self._launch(first)
        for layer, graph in enumerate(behind_experts):
            self._layers.approach(layer)
            self._routes_known.synchronize()
            self._layers.compute(layer, live_routes, self._hidden, self._products, partial(self._launch, graph))
        return pieces.logits[: len(tokens)]

    def _launch(self, piece: torch.cuda.CUDAGraph) -> None:
        piece.replay()
        self._routes_known.record(self._stream)

    def clear(self) -> None:
        """Drop the products of a pass that was cut inside a layer: padded rows would keep theirs."""
        self._products.zero_()

    def capture(self, bucket: int) -> _Pieces:
        """The pieces for `bucket`."""
        logits: list[Tensor] = []
        graphs = self._pool.capture(lambda recorder: logits.append(self._run(bucket, recorder)))
        self._sets[bucket] = _Pieces(graphs, logits[0])
        return self._sets[bucket]

    def _run(self, bucket: int, recorder: PieceRecorder | None) -> Tensor:
        def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
            self._hidden.copy_(hidden)
            self._routes.copy_(routes, non_blocking=True)
            if recorder is not None:
                recorder.cut()
            mixed = weighted_sum(self._products.view(*routes.shape, -1), weights)
            self._products.zero_()
            return mixed

        rows = self._inputs
        return self._forward(rows.tokens, rows.seen, rows.written, bucket, experts)
