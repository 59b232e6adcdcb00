"""The draft over a prompt's first rows, for its routes: the link begins with them before the target has asked.

One eager pass with the resident base of the experts, no graph: the rows are as many as the prompt has. Its keys and
values are the draft's; the target's prefill that follows writes every one of them again. The host launches far ahead of
the device and tells a layer's routes when they have come back.

Shapes: T rows, L MoE layers, K experts a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moespeq.model.graphs.attention import attention_of_any_shape
from moespeq.model.graphs.compiled import eager_layers
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.static_pass import LayerExperts
from moespeq.model.runner import OnLayer

__all__ = ["PromptDraft"]

# More name few new experts, and each routed pair reads its expert's base once more.
_MAX_ROWS = 128


class PromptDraft:
    """`experts` are the draft's."""

    def __init__(
        self, forward: Forward, experts: LayerExperts, *, num_layers: int, top_k: int, device: torch.device
    ) -> None:
        self._forward, self._experts = forward, experts
        self._routes = torch.zeros(num_layers, _MAX_ROWS, top_k, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.current_stream(device)
        self._known = [torch.cuda.Event() for _ in range(num_layers)]

    def run(self, tokens: Sequence[int], start: int, bucket: int, on_layer: OnLayer) -> None:
        """See Runner.foresee; the rows' last place lies inside `bucket`."""
        ids = torch.tensor(tokens[:_MAX_ROWS], device=self._stream.device)
        places = torch.arange(start, start + len(ids), device=self._stream.device)
        told = 0

        def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
            nonlocal told
            self._routes[layer, : len(routes)].copy_(routes, non_blocking=True)
            self._known[layer].record(self._stream)
            mixed = self._experts(layer, hidden, routes, weights)
            while told < layer and self._known[told].query():
                on_layer(told, self._routes[told, : len(ids)].tolist())
                told += 1
            return mixed

        with eager_layers(), attention_of_any_shape():
            self._forward(ids, places, places, bucket, experts, num_logits=1)
        for layer in range(told, len(self._known)):
            self._known[layer].synchronize()
            on_layer(layer, self._routes[layer, : len(ids)].tolist())
