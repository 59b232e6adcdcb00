"""Engines that stay open while rows take turns, as many as memory allows.

Rows that differ in knobs only share an engine, retuned for each generation: it then forgets its slots, so that no row
profits from what another one fetched. An engine is closed when another needs its place.
"""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil

import moespeq
from device_memory import device_peak
from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine
from moespeq.decode.planning import plan_of
from moespeq.errors import MoespeqError
from moespeq.nested import Layout
from moespeq.store import Store
from rows import ROWS, Row

_KNOBS: dict[str, Any] = {"k": "auto", "prefetch": True, "eviction": "auto", "link_bytes_per_s": None}


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine and what opening it took; peak_device_bytes is the driver's figure, None without a GPU."""

    engine: Engine
    load_s: float
    rss_bytes: int
    peak_device_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": _plan_json(self.engine),
            "facts": dict(self.engine.facts),
            "load_s": round(self.load_s, 2),
            "rss_bytes": self.rss_bytes,
            "peak_device_bytes": self.peak_device_bytes,
        }


class EnginePool:
    """At most `max_open` engines of one store.

    store: the path for a row's layout; common: options of every row. warm_up runs whatever must be compiled, captured
    and allocated before anything is timed; on_open is told of each new engine after that. context_bytes: what CUDA
    itself takes of the device.
    """

    def __init__(
        self,
        store: Callable[[Layout | None], Path],
        common: Mapping[str, Any],
        *,
        max_open: int,
        context_bytes: int,
        warm_up: Callable[[Engine], None],
        on_open: Callable[[str, Opened], None],
    ) -> None:
        self._store, self._common, self._max_open, self._context_bytes = store, dict(common), max_open, context_bytes
        self._warm_up, self._on_open = warm_up, on_open
        self._open: OrderedDict[str, Engine] = OrderedDict()
        self._refused: dict[str, MoespeqError | RuntimeError] = {}

    def get(self, row: Row, link_bytes_per_s: float | None) -> Engine:
        """The engine of `row` at this link. Raises what loading raises, and does not try twice."""
        options = self._options(row, link_bytes_per_s)
        key = self.key(row, link_bytes_per_s)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._open:
            try:
                self._open_new(key, row, options)
            except (MoespeqError, RuntimeError) as error:
                self._refused[key] = error
                raise
        self._open.move_to_end(key)
        engine = self._open[key]
        engine.retune(**{name: options.get(name, default) for name, default in _KNOBS.items()})
        return engine

    def key(self, row: Row, link_bytes_per_s: float | None) -> str:
        """Equal for rows that share an engine."""
        options = self._options(row, link_bytes_per_s)
        fixed = {name: value for name, value in options.items() if name not in _KNOBS}
        return repr((sorted(fixed.items()), row.slots_as, row.layout))

    def close(self) -> None:
        """Close every engine."""
        while self._open:
            self._close_oldest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _options(self, row: Row, link_bytes_per_s: float | None) -> dict[str, Any]:
        paced = {} if link_bytes_per_s is None else {"link_bytes_per_s": link_bytes_per_s}
        return {**self._common, **row.load, **row.knobs, **paced}

    def _open_new(self, key: str, row: Row, options: dict[str, Any]) -> None:
        while len(self._open) >= self._max_open:
            self._close_oldest()
        if row.slots_as is not None:
            options = {**options, "device_memory": self._budget_for_slots(options, ROWS[row.slots_as])}
        with device_peak(self._context_bytes) as peak:
            begin_s = time.perf_counter()
            engine = moespeq.load(self._store(row.layout), **options)
            load_s = time.perf_counter() - begin_s
            try:
                self._warm_up(engine)
            except BaseException:
                engine.close()
                raise
        self._open[key] = engine
        self._on_open(row.name, Opened(engine, load_s, psutil.Process().memory_info().rss, peak()))

    def _budget_for_slots(self, options: Mapping[str, Any], like: Row) -> int:
        """Device memory that gives an engine of `options` as many slots as the row `like` has."""
        with Store.open(self._store(like.layout)) as store:
            own, other = (
                plan_of(store, LoadOptions.from_mapping(each))[1] for each in (options, self._options(like, None))
            )
        return own.total_bytes - own.slots_bytes + other.num_slots * own.slot_bytes

    def _close_oldest(self) -> None:
        _, engine = self._open.popitem(last=False)
        engine.close()
        del engine
        gc.collect()


def _plan_json(engine: Engine) -> dict[str, Any]:
    plan = engine.plan
    return {**asdict(plan), "total_bytes": plan.total_bytes, "slots_bytes": plan.slots_bytes}
