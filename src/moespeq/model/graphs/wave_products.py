"""A verified layer's expert products, wave by wave: a table for the wave, one graph of the verify kernels, a fence.

The kernels' grid is fixed and the table says what there is to do, so one captured graph serves every layer and wave.
The host writes a wave's table while earlier waves may still be reading theirs: there are several, each with a graph of
its own, and one is written again only after its wave has run. The fence tells the link which slots the kernels read.

Shapes: R rows, K experts a row, E experts, H hidden, I intermediate, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moespeq.kernels.geometry import ExpertGeometry
from moespeq.kernels.verify import verify_experts
from moespeq.kernels.verify_table import VerifyTable
from moespeq.model.graphs.capture import GraphPool
from moespeq.model.runner import OnLayer
from moespeq.nested import Layout
from moespeq.residency import Residency

__all__ = ["DeviceExperts", "WaveProducts"]

_NUM_TABLES = 8


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """The experts as the kernels see them: slots uint8 [S, stride], bank uint8 [L * E, base bytes] or None."""

    slots: Tensor
    bank: Tensor | None
    geometry: ExpertGeometry
    layouts: Sequence[Layout]
    num_experts: int
    activation: str


@dataclass(slots=True)
class _Station:
    """A table, the event behind its last launch, and its graph for each layout."""

    table: VerifyTable
    done: torch.cuda.Event
    graphs: dict[Layout, torch.cuda.CUDAGraph]


class WaveProducts:
    """See LayerProducts. `on_layer` hears the true routes; `release` is told which slots launched kernels read."""

    def __init__(
        self,
        experts: DeviceExperts,
        residency: Residency,
        pool: GraphPool,
        *,
        rows: int,
        top_k: int,
        release: Callable[[Sequence[int]], None],
    ) -> None:
        self._experts, self._residency, self._pool, self._release = experts, residency, pool, release
        self._top_k = top_k
        device = experts.slots.device
        self._inner = torch.zeros(rows * top_k, experts.geometry.intermediate, dtype=torch.bfloat16, device=device)
        self._stations = [
            _Station(VerifyTable(experts.num_experts, rows, top_k, device), torch.cuda.Event(), {})
            for _ in range(_NUM_TABLES)
        ]
        self._num_launched = 0
        self._slot_of = np.full(experts.num_experts, -1, dtype=np.int32)
        self._bank_rows = np.arange(len(experts.layouts) * experts.num_experts, dtype=np.int32)
        self.on_layer: OnLayer | None = None

    def compute(self, layer: int, routes: Tensor, hidden: Tensor, products: Tensor) -> None:
        rows: list[list[int]] = routes.tolist()
        if self.on_layer is not None:
            self.on_layer(layer, rows)
        live = routes.numpy()
        for wave in self._residency.acquire(layer, sorted({expert for row in rows for expert in row})):
            self._launch(layer, wave.experts, wave.slots, live, hidden, products)
            self._residency.pump()

    def _launch(
        self,
        layer: int,
        experts: Sequence[int],
        slots: Sequence[int],
        live: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        hidden: Tensor,
        products: Tensor,
    ) -> None:
        station = self._stations[self._num_launched % _NUM_TABLES]
        if self._num_launched >= _NUM_TABLES:
            station.done.synchronize()
        self._num_launched += 1
        first = layer * self._experts.num_experts
        self._slot_of[experts] = slots
        station.table.fill(live, self._slot_of, self._bank_rows[first : first + self._experts.num_experts])
        self._slot_of[experts] = -1
        self._graph(station, self._experts.layouts[layer], hidden, products).replay()
        station.done.record()
        self._release(slots)

    def _graph(self, station: _Station, layout: Layout, hidden: Tensor, products: Tensor) -> torch.cuda.CUDAGraph:
        graph = station.graphs.get(layout)
        if graph is None:
            (graph,) = self._pool.capture(lambda _: self._run(station.table, layout, hidden, products))
            station.graphs[layout] = graph
        return graph

    def warm_up(self, hidden: Tensor, products: Tensor) -> None:
        """Compile the kernels and capture all graphs."""
        for layout in set(self._experts.layouts):
            self._pool.warm_up(partial(self._run, self._stations[0].table, layout, hidden, products))
            for station in self._stations:
                self._graph(station, layout, hidden, products)

    def _run(self, table: VerifyTable, layout: Layout, hidden: Tensor, products: Tensor) -> None:
        experts = self._experts
        table.upload()
        verify_experts(
            hidden,
            table,
            experts.slots,
            experts.slots if experts.bank is None else experts.bank,  # plain records are never completed from a bank
            products,
            self._inner,
            geometry=experts.geometry,
            layout=layout,
            top_k=self._top_k,
            activation=experts.activation,
        )
