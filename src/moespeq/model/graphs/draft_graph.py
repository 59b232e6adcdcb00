"""The draft step as one CUDA graph, k + 1 of them in a row without waiting for the host.

Token and place are static tensors that each step advances on the device, so all steps of a round are launched at once.
The host follows behind: a step's routes are copied to a ring of pinned memory, and an event says when they are there;
while the device drafts step i + 1, the host predicts and fetches from step i.

Shapes: L MoE layers, K experts a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moespeq.model.graphs.capture import GraphPool
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.static_pass import LayerExperts
from moespeq.model.passes import Choose, GoesOn, OnStep

__all__ = ["DraftGraphs"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One captured step; `logits` [1, V] are valid until the next replay of any graph."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class DraftGraphs:
    """One graph for each length bucket, captured when it is first needed."""

    def __init__(
        self,
        forward: Forward,
        pool: GraphPool,
        experts: LayerExperts,
        *,
        num_layers: int,
        top_k: int,
        max_steps: int,
        device: torch.device,
    ) -> None:
        self._forward, self._pool, self._experts = forward, pool, experts
        self._token = torch.zeros(1, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._routes = torch.zeros(num_layers, top_k, dtype=torch.int64, device=device)
        self._ring = torch.zeros(max_steps, num_layers, top_k, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.current_stream(device)
        self._events = [torch.cuda.Event() for _ in range(max_steps)]
        self._steps: dict[int, _Step] = {}

    def warm_up(self, spare_place: int, bucket: int) -> None:
        """Run a step once without capture, at a place that no sequence uses: what must not happen in a capture does."""
        self._place.fill_(spare_place)
        self._pool.warm_up(lambda: self._run(bucket))

    def draft(
        self,
        token: int,
        position: int,
        bucket: int,
        num_steps: int,
        choose: Choose,
        on_step: OnStep,
        *,
        num_chosen: int,
        goes_on: GoesOn | None,
    ) -> None:
        """See Runner.draft."""
        step_graph = self._steps.get(bucket) or self.capture(bucket)
        self._token.fill_(token)
        self._place.fill_(position)
        num_told = step = 0
        while step < num_steps:
            step_graph.graph.replay()
            self._ring[step].copy_(self._routes, non_blocking=True)
            self._events[step].record(self._stream)
            if step < num_chosen:
                self._token.copy_(choose(step_graph.logits, step))
                if goes_on is not None and step + 1 < num_chosen and not goes_on():
                    num_steps, num_chosen = step + 2, step + 1
            while num_told < step and self._events[num_told].query():
                on_step(num_told, self._routes_of(num_told))
                num_told += 1
            step += 1
        for step in range(num_told, num_steps):
            self._events[step].synchronize()
            on_step(step, self._routes_of(step))

    def _routes_of(self, step: int) -> Sequence[Sequence[int]]:
        routes: list[list[int]] = self._ring[step].tolist()
        return routes

    def capture(self, bucket: int) -> _Step:
        """The graph for `bucket`."""
        logits: list[Tensor] = []
        (graph,) = self._pool.capture(lambda _: logits.append(self._run(bucket)))
        self._steps[bucket] = _Step(graph, logits[0])
        return self._steps[bucket]

    def _run(self, bucket: int) -> Tensor:
        routed: list[Tensor] = []

        def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
            routed.append(routes)
            return self._experts(layer, hidden, routes, weights)

        logits = self._forward(self._token, self._place, self._place, bucket, experts)
        torch.cat(routed, out=self._routes)
        self._place.add_(1)
        return logits
