"""A prompt's experts, wave by wave as records arrive.

The link is the floor of a prefill, so what host and device do for a record must take less time than its copy. Where
experts get a few hundred pairs each, the verify kernels do it in two launches a wave; where they get more, torch's own
products, which decode each expert once, are what the device needs (`TargetExperts`).

Shapes: T rows, K experts a row, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moespeq.kernels import ExpertMath
from moespeq.kernels.chunk_table import ChunkTable
from moespeq.kernels.verify import verify_experts
from moespeq.kernels.verify_table import RoutedPairs
from moespeq.kernels.weighted_sum import weighted_sum
from moespeq.model.experts import TargetExperts
from moespeq.model.graphs.static_pass import LayerExperts
from moespeq.model.graphs.wave_products import DeviceExperts, Point, Release
from moespeq.residency import Residency

__all__ = ["PrefillExperts"]

_NUM_BUFFERS = 16
_FEW_PAIRS = 256  # an expert, on average


class PrefillExperts:
    """The experts of prompts of any length; target and maths are for the long ones."""

    def __init__(
        self,
        experts: DeviceExperts,
        residency: Residency,
        target: TargetExperts,
        maths: Sequence[ExpertMath],
        *,
        top_k: int,
        release: Release,
    ) -> None:
        self._target, self._maths = target, maths
        self._max_few_rows = _FEW_PAIRS * experts.num_experts // top_k
        self._few = _FewPairs(experts, residency, top_k=top_k, max_rows=self._max_few_rows, release=release)

    def warm_up(self) -> None:
        """Compile the kernels of prompts that are not long, which takes up to half a minute the first time."""
        self._few.warm_up()

    def of(self, num_rows: int) -> LayerExperts:
        """Those of a pass of `num_rows` live rows."""
        if num_rows <= self._max_few_rows:
            return self._few
        self._target.expect(live_rows=num_rows, row_tile=None, on_layer=None)
        return self._many

    def _many(self, layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        return self._target(layer, self._maths[layer], hidden, routes, weights)


class _FewPairs:
    """A LayerExperts over prompts of at most `max_rows` rows; every row is live."""

    def __init__(
        self, experts: DeviceExperts, residency: Residency, *, top_k: int, max_rows: int, release: Release
    ) -> None:
        self._experts, self._residency, self._release, self._top_k = experts, residency, release, top_k
        device = experts.slots.device
        self._table = ChunkTable(experts.num_experts, max_rows * top_k, device, num_waves=_NUM_BUFFERS)

    def warm_up(self) -> None:
        """Launch over no groups."""
        slots, top_k = self._experts.slots, self._top_k
        hidden = slots.new_zeros(1, self._experts.geometry.hidden, dtype=torch.bfloat16)
        products = hidden.new_empty(top_k, hidden.shape[1])
        inner = hidden.new_empty(top_k, self._experts.geometry.intermediate)
        self._table.clear()
        for layout in set(self._experts.layouts):
            self._launch(self._experts.layouts.index(layout), hidden, products, inner, top_k)
        weighted_sum(products.view(1, top_k, -1), hidden.new_zeros(1, top_k))

    def __call__(self, layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        self._residency.pump()  # while the device computes all that was launched so far, the routes last
        pairs, table = RoutedPairs(routes.cpu().numpy()), self._table
        products = hidden.new_empty(routes.numel(), hidden.shape[1])  # [T * K, H]
        inner = hidden.new_empty(routes.numel(), self._experts.geometry.intermediate)  # [T * K, I]
        behind: dict[int, Point] = {}
        table.begin_layer(pairs)
        for number, wave in enumerate(self._residency.acquire(layer, pairs.experts.tolist())):
            buffer = number % _NUM_BUFFERS
            if buffer in behind:
                behind[buffer].synchronize()
            table.fill(buffer, pairs, wave.experts, wave.slots, wave.base_rows)
            self._launch(layer, hidden, products, inner, routes.shape[1])
            behind[buffer] = self._release(wave.slots)
        return weighted_sum(products.view(*routes.shape, -1), weights)

    def _launch(self, layer: int, hidden: Tensor, products: Tensor, inner: Tensor, top_k: int) -> None:
        experts = self._experts
        verify_experts(
            hidden,
            self._table,
            experts.slots,
            experts.bank_or_slots,
            products,
            inner,
            geometry=experts.geometry,
            layout=experts.layouts[layer],
            top_k=top_k,
            activation=experts.activation,
        )
