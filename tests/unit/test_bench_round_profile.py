"""Own time leaves out the timed calls inside; a trace falls into passes, whose copies may rest."""

from __future__ import annotations

import time
from typing import Any

import pytest

from round_profile import Spans, passes_of


class Work:
    def outer(self) -> str:
        self.inner()
        return "done"

    def inner(self) -> None:
        time.sleep(0.02)


def test_a_call_owns_what_the_timed_calls_inside_it_do_not() -> None:
    spans = Spans()
    for name in ("outer", "inner"):
        spans.watch(Work, name)
    Work().outer()
    assert spans.rows(1) == [], "timed only while it measures"

    assert spans.measure(Work().outer) == "done"

    inner, outer = spans.rows(1)
    assert (inner["call"], outer["call"]) == ("Work.inner", "Work.outer")
    assert outer["total_ms"] >= inner["own_ms"] >= 20
    assert outer["own_ms"] == pytest.approx(outer["total_ms"] - inner["total_ms"])


def event(kind: str, name: str, begin_ms: float, length_ms: float, num_bytes: int = 0) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": 1e3 * begin_ms, "dur": 1e3 * length_ms, "args": {"bytes": num_bytes}}


def test_passes_are_parted_by_a_draft_and_say_where_the_link_rested() -> None:
    copy = ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)")
    trace = [
        event("kernel", "_grouped_product", 0, 2),
        event(*copy, 1, 3, 8_000_000),
        event(*copy, 4, 1, 8_000_000),
        event(*copy, 6, 3, 8_000_000),  # a rest of one millisecond before it
        event(*copy, 6, 3, 1504),  # a table
        event("kernel", "_linears", 3, 1),
        event("kernel", "_grouped_product", 8, 2),
        event("kernel", "_draft_up", 20, 5),
        event("kernel", "_grouped_product", 40, 1),
    ]
    first, second = passes_of(trace)
    assert first == pytest.approx(
        {"length_ms": 10, "kernels_ms": 5, "link_ms": 7, "records": 3, "rests": 1, "rests_ms": 1}
    )
    assert (second["length_ms"], second["records"]) == (pytest.approx(1), 0)
