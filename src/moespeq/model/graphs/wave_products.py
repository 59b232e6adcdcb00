"""A verified layer's expert products, wave by wave: a table for the wave, one graph of the verify kernels, a fence.

The kernels' grid is fixed and the table says what there is to do, so one captured graph serves every layer and wave.
The host writes a wave's table while earlier waves may still be reading theirs: there are several, each with a graph of
its own, and one is written again only after its wave has run. The fence tells the link which slots the kernels read.

Shapes: R rows, K experts a row, E experts, H hidden, I intermediate, S slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moespeq.kernels.geometry import ExpertGeometry
from moespeq.kernels.verify import verify_experts
from moespeq.kernels.verify_table import RoutedPairs, VerifyTable
from moespeq.model.graphs.capture import GraphPool
from moespeq.model.passes import OnLayer
from moespeq.nested import Layout
from moespeq.residency import Residency

__all__ = ["DeviceExperts", "Point", "Release", "WaveProducts"]

_NUM_TABLES = 8


@dataclass(frozen=True, slots=True)
class DeviceExperts:
    """The experts as the kernels see them: slots uint8 [S, stride], bank uint8 [rows, base bytes] or None."""

    slots: Tensor
    bank: Tensor | None
    geometry: ExpertGeometry
    layouts: Sequence[Layout]
    num_experts: int
    activation: str

    @property
    def bank_or_slots(self) -> Tensor:
        """The bank, or any tensor where there is none and nothing is read from it."""
        return self.slots if self.bank is None else self.bank


class Release(Protocol):
    """Told which slots are read by what was launched so far; returns the point behind it, which can be waited for."""

    def __call__(self, slots: Sequence[int]) -> Point: ...


class Point(Protocol):
    """A place in the order of what was launched."""

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class _Station:
    """A table, its graph for each layout, and the point behind the last launch."""

    table: VerifyTable
    graphs: dict[Layout, torch.cuda.CUDAGraph]
    behind: Point | None = None


class WaveProducts:
    """See LayerProducts. `on_layer` hears the true routes; `release` of every launch."""

    def __init__(
        self, experts: DeviceExperts, residency: Residency, pool: GraphPool, *, rows: int, top_k: int, release: Release
    ) -> None:
        self._experts, self._residency, self._pool, self._release = experts, residency, pool, release
        self._top_k = top_k
        device = experts.slots.device
        self._inner = torch.zeros(rows * top_k, experts.geometry.intermediate, dtype=torch.bfloat16, device=device)
        self._stations = [
            _Station(VerifyTable(experts.num_experts, rows, top_k, device), {}) for _ in range(_NUM_TABLES)
        ]
        self.on_layer: OnLayer | None = None

    def approach(self, layer: int) -> None:
        self._residency.approach(layer)

    def compute(
        self,
        layer: int,
        routes: npt.NDArray[np.int64],
        hidden: Tensor,
        products: Tensor,
        launch_next: Callable[[], None],
    ) -> None:
        pairs, heard = RoutedPairs(routes), None
        waves = self._residency.acquire(layer, pairs.experts())
        for station, wave in zip(itertools.cycle(self._stations), waves, strict=False):
            if station.behind is not None:
                station.behind.synchronize()
            station.table.fill(pairs, wave.experts, wave.slots, wave.base_rows)
            self._graph(station, self._experts.layouts[layer], hidden, products).replay()
            station.behind = self._release(wave.slots)
            if wave.is_last:
                heard = None if self.on_layer is None else routes.tolist()
                launch_next()
            self._residency.pump()
        if self.on_layer is not None and heard is not None:
            self.on_layer(layer, heard)  # while the device is busy with all of it
        for station in self._stations:
            station.behind = None  # the next layer's routes are known only after all of this has run

    def warm_up(self, hidden: Tensor, products: Tensor) -> None:
        """Compile the kernels and capture all graphs."""
        for layout in set(self._experts.layouts):
            self._pool.warm_up(partial(self._run, self._stations[0].table, layout, hidden, products))
            for station in self._stations:
                self._graph(station, layout, hidden, products)

    def _graph(self, station: _Station, layout: Layout, hidden: Tensor, products: Tensor) -> torch.cuda.CUDAGraph:
        graph = station.graphs.get(layout)
        if graph is None:
            (graph,) = self._pool.capture(lambda _: self._run(station.table, layout, hidden, products))
            station.graphs[layout] = graph
        return graph

    def _run(self, table: VerifyTable, layout: Layout, hidden: Tensor, products: Tensor) -> None:
        experts = self._experts
        table.upload()
        verify_experts(
            hidden,
            table,
            experts.slots,
            experts.bank_or_slots,
            products,
            self._inner,
            geometry=experts.geometry,
            layout=layout,
            top_k=self._top_k,
            activation=experts.activation,
        )
