"""The history of passes is bounded, numbered, cheap where nothing changed, and adds up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

from moespeq.decode.link_meter import LinkUse
from moespeq.decode.spectator import PassSeen
from moespeq.residency import Residency
from moespeq.server.history import EXPERTS_EVERY_S, RoundHistory
from moespeq.types import Cause, StepReport


class Slots:
    """As much of a residency as a history looks at."""

    def __init__(self) -> None:
        self.wasted_bytes, self.num_experts, self.num_looks = 0, 2, 0

    @property
    def cache(self) -> Slots:
        return self

    def standing(self) -> tuple[list[int], list[float]]:
        self.num_looks += 1
        return [self.num_looks], [0.0, 1.0]


def seen(slots: Slots, *, at_s: float = 0.0, is_prefill: bool = False, **report: Any) -> PassSeen:
    """A pass of 0.1 s that began at `at_s`."""
    fields = {"k": 2, "accepted": 1, "committed": 2, "hits": 5, "late": 1, "misses": 2}
    made = StepReport(draft_s=0.01, verify_s=0.08, stall_s=0.02, **(fields | report))
    link = LinkUse(0.03, 0.02, stalls=[(at_s, at_s + 0.02)], busy=[(at_s, at_s + 0.03)])
    return PassSeen(at_s, at_s + 0.1, is_prefill, made, link, cast(Residency, slots))


def filled(passes: Sequence[PassSeen]) -> RoundHistory:
    history = RoundHistory()
    for one in passes:
        history.hear_pass(one)
    return history


def test_a_reader_gets_the_passes_it_lacks_in_order() -> None:
    slots = Slots()
    history = filled([seen(slots, at_s=float(number)) for number in range(5)])
    assert [kept.number for kept in history.since(0).passes] == [1, 2, 3, 4, 5]
    assert [kept.begin_s for kept in history.since(3).passes] == [3.0, 4.0]
    assert [spans.number for spans in history.since(3).spans] == [4, 5]
    assert history.since(5).passes == []
    assert history.since(99).passes == []


def test_a_long_life_fills_no_memory() -> None:
    slots = Slots()
    history = filled([seen(slots, at_s=float(number)) for number in range(2000)])
    glimpse = history.since(0)
    assert [kept.number for kept in glimpse.passes] == list(range(2000 - 480 + 1, 2001))
    assert [spans.number for spans in glimpse.spans] == list(range(2000 - 16 + 1, 2001))
    assert glimpse.totals["rounds"] == 2000


def test_experts_are_looked_at_only_so_often() -> None:
    slots = Slots()
    history = filled([seen(slots, at_s=0.0), seen(slots, at_s=EXPERTS_EVERY_S / 2)])
    assert slots.num_looks == 1
    assert (experts := history.since(0).experts) is not None
    assert (experts.number, experts.resident) == (1, [1])
    history.hear_pass(seen(slots, at_s=EXPERTS_EVERY_S))
    assert slots.num_looks == 2
    assert (experts := history.since(0).experts) is not None
    assert (experts.number, experts.num_experts) == (3, 2)


def test_wasted_bytes_are_those_of_the_pass_even_where_counting_began_anew() -> None:
    slots = Slots()
    history = RoundHistory()
    for slots.wasted_bytes in (10, 10, 25, 4, 6):
        history.hear_pass(seen(slots))
    assert [kept.wasted_bytes for kept in history.since(0).passes] == [10, 0, 15, 0, 2]
    assert history.since(0).totals["wasted_bytes"] == 27


def test_totals_are_the_sums_of_all_passes() -> None:
    slots = Slots()
    moved = {Cause.DEMAND: 7, Cause.PREFETCH: 3}
    history = filled([seen(slots, is_prefill=True, bytes_by_cause=moved), seen(slots, bytes_by_cause=moved)])
    expected = {"prefills": 1, "rounds": 1, "committed": 4, "hits": 5, "late": 1, "misses": 2, "wasted_bytes": 0}
    expected |= {"prefill_hits": 5, "prefill_late": 1, "prefill_misses": 2}
    assert history.since(0).totals == expected | {"demand_bytes": 14, "prefetch_bytes": 6}


def test_a_reader_may_read_while_the_engine_goes_on() -> None:
    slots, history = Slots(), RoundHistory()

    def go_on() -> None:
        for number in range(600):
            history.hear_pass(seen(slots, at_s=float(number)))

    engine = threading.Thread(target=go_on)
    engine.start()
    is_last = False
    while not is_last:
        is_last = not engine.is_alive()
        numbers = [kept.number for kept in history.since(0).passes]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else not is_last
    assert numbers[-1] == 600
