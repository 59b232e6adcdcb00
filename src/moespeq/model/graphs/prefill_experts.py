"""A prompt's experts, wave by wave as records arrive.

The link is the floor of a prefill, so what host and device do for a record must take less time than its copy. Where
experts get few pairs each, the verify kernels do it in two launches a wave; where they get more, an expert is decoded
once and multiplied in large tiles (`kernels.prefill`), in two launches a matrix of a batch of experts.

Shapes: T rows, K experts a row, P = T * K routed pairs, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moespeq.kernels.chunk_table import GROUP_PAIRS, ChunkTable
from moespeq.kernels.prefill import prefill_experts
from moespeq.kernels.verify import verify_experts
from moespeq.kernels.verify_table import RoutedPairs
from moespeq.kernels.weighted_sum import weighted_sum
from moespeq.model.graphs.static_pass import LayerExperts
from moespeq.model.graphs.wave_products import DeviceExperts, Point, Release
from moespeq.nested import Layout
from moespeq.residency import Residency

__all__ = ["PrefillExperts"]

_NUM_BUFFERS = 16
_FEW_PAIRS = 64
"""An expert, on average. Up to 48 the verify kernels decode an expert once, as the others do, and write it nowhere;
from then on once for every 48."""


class PrefillExperts:
    """The experts of prompts of up to `max_rows` rows.

    scratch_bytes: device memory for decoded matrices, at least of one expert; taken unless all records are plain.
    """

    def __init__(
        self,
        experts: DeviceExperts,
        residency: Residency,
        *,
        top_k: int,
        max_rows: int,
        scratch_bytes: int,
        release: Release,
    ) -> None:
        device, num_experts = experts.slots.device, experts.num_experts
        has_nested = any(layout is not Layout.PLAIN for layout in experts.layouts)
        scratch = torch.empty(has_nested * scratch_bytes // 2, dtype=torch.bfloat16, device=device)
        few_rows = min(_FEW_PAIRS * num_experts // top_k, max_rows)

        def in_waves(multiply: Callable[..., None], rows: int, group_pairs: int | None) -> _InWaves:
            table = ChunkTable(num_experts, rows * top_k, device, num_waves=_NUM_BUFFERS, group_pairs=group_pairs)
            return _InWaves(experts, residency, table, multiply, top_k=top_k, release=release)

        self._few_rows = few_rows
        self._few = in_waves(verify_experts, few_rows, GROUP_PAIRS)
        self._many = in_waves(partial(prefill_experts, scratch=scratch), max_rows, None)

    def warm_up(self) -> None:
        """Compile the kernels, which takes up to a minute the first time."""
        self._few.warm_up()
        self._many.warm_up()

    def of(self, num_rows: int) -> LayerExperts:
        """Those of a pass of `num_rows` live rows."""
        return self._few if num_rows <= self._few_rows else self._many


class _InWaves:
    """A LayerExperts over whatever prompts `table` has room for; every row is live.

    multiply: verify_experts, or a function that is called as it is.
    """

    def __init__(
        self,
        experts: DeviceExperts,
        residency: Residency,
        table: ChunkTable,
        multiply: Callable[..., None],
        *,
        top_k: int,
        release: Release,
    ) -> None:
        self._experts, self._residency, self._table, self._release = experts, residency, table, release
        self._multiply, self._top_k = multiply, top_k

    def warm_up(self) -> None:
        """Launch over no groups."""
        slots, top_k = self._experts.slots, self._top_k
        hidden = slots.new_zeros(1, self._experts.geometry.hidden, dtype=torch.bfloat16)
        products = hidden.new_empty(top_k, hidden.shape[1])
        inner = hidden.new_empty(top_k, self._experts.geometry.intermediate)
        self._table.clear()
        for layout in set(self._experts.layouts):
            self._launch(self._experts.layouts.index(layout), hidden, products, inner)
        weighted_sum(products.view(1, top_k, -1), hidden.new_zeros(1, top_k))

    def __call__(self, layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        self._residency.pump()  # while the device computes all that was launched so far, the routes last
        pairs, table = RoutedPairs(routes.cpu().numpy()), self._table
        products = hidden.new_empty(routes.numel(), hidden.shape[1])  # [P, H]
        inner = hidden.new_empty(routes.numel(), self._experts.geometry.intermediate)  # [P, I]
        behind: dict[int, Point] = {}
        table.begin_layer(pairs)
        for number, wave in enumerate(self._residency.acquire(layer, pairs.experts())):
            buffer = number % _NUM_BUFFERS
            if buffer in behind:
                behind[buffer].synchronize()
            table.fill(buffer, pairs, wave.experts, wave.slots, wave.base_rows)
            self._launch(layer, hidden, products, inner)
            behind[buffer] = self._release(wave.slots)
        return weighted_sum(products.view(*routes.shape, -1), weights)

    def _launch(self, layer: int, hidden: Tensor, products: Tensor, inner: Tensor) -> None:
        experts = self._experts
        self._multiply(
            hidden,
            self._table,
            experts.slots,
            experts.bank_or_slots,
            products,
            inner,
            geometry=experts.geometry,
            layout=experts.layouts[layer],
            top_k=self._top_k,
            activation=experts.activation,
        )
