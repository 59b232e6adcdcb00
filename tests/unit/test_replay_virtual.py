"""The virtual link keeps its arithmetic: bandwidth is serial, depth hides latency and adds no bandwidth."""

from __future__ import annotations

import pytest

from moespeq.ports import Clock, Mover
from moespeq.replay import LinkModel, VirtualClock, VirtualMover, belady_misses
from moespeq.types import Cause, ExpertKey, Fetch


def fetch(expert: int, num_bytes: int = 100, cause: Cause = Cause.DEMAND) -> Fetch:
    return Fetch(ExpertKey(0, expert), expert, num_bytes, cause)


def mover(link: LinkModel) -> tuple[VirtualClock, VirtualMover]:
    clock = VirtualClock()
    return clock, VirtualMover(clock, link)


def test_virtual_parts_are_what_residency_expects() -> None:
    clock, link = mover(LinkModel(1.0))
    assert isinstance(clock, Clock)
    assert isinstance(link, Mover)


def test_records_arrive_one_after_another_at_the_bandwidth() -> None:
    clock, link = mover(LinkModel(bytes_per_s=100.0))
    link.submit(fetch(0))
    link.submit(fetch(1, num_bytes=50))
    assert link.poll() == []
    clock.advance(1.0)
    assert [done.fetch.key.expert for done in link.poll()] == [0]
    assert [done.fetch.key.expert for done in link.wait()] == [1]
    assert clock.now_s() == 1.5
    assert link.wait() == []


@pytest.mark.parametrize(("depth", "last_s"), [(1, 6.0), (2, 4.0), (4, 4.0)])
def test_depth_hides_latency_only(depth: int, last_s: float) -> None:
    clock, link = mover(LinkModel(bytes_per_s=100.0, latency_s=1.0, depth=depth))
    for expert in range(3):
        link.submit(fetch(expert))
    link.close()
    assert clock.now_s() == last_s
    assert link.busy_s == 3.0


def test_completion_reports_how_long_the_record_took_from_submission() -> None:
    clock, link = mover(LinkModel(bytes_per_s=100.0))
    clock.advance(5.0)
    link.submit(fetch(0))
    link.submit(fetch(1))
    assert [done.seconds for done in (*link.wait(), *link.wait())] == [1.0, 2.0]


def test_link_begins_the_most_urgent_fetch_that_is_queued_when_it_gets_to_it() -> None:
    clock, link = mover(LinkModel(bytes_per_s=100.0, depth=1))
    link.submit(fetch(0, cause=Cause.STAGE))
    link.submit(fetch(1, cause=Cause.STAGE))
    link.submit(fetch(2, cause=Cause.DEMAND))
    clock.advance(1.5)
    link.submit(fetch(3, cause=Cause.DEMAND))
    assert [done.fetch.key.expert for _ in range(4) for done in link.wait()] == [0, 2, 3, 1]
    assert clock.now_s() == 4.0


def test_cancelled_fetch_never_moves_and_one_that_began_arrives() -> None:
    clock, link = mover(LinkModel(bytes_per_s=100.0, depth=1))
    fetches = [fetch(expert) for expert in range(3)]
    for each in fetches:
        link.submit(each)
    assert not link.cancel(fetches[0])
    assert link.cancel(fetches[1])
    assert not link.cancel(fetches[1])
    clock.advance(1.0)
    assert not link.cancel(fetches[2]), "the link got to it when the first one ended"
    link.close()
    assert (clock.now_s(), link.busy_s) == (2.0, 2.0)


def test_cancelling_keeps_the_order_of_the_others() -> None:
    _, link = mover(LinkModel(bytes_per_s=100.0, depth=1))
    causes = (Cause.DEMAND, Cause.STAGE, Cause.PREFETCH, Cause.SATURATE, Cause.PRIME)
    fetches = [fetch(expert, cause=cause) for expert, cause in enumerate(causes)]
    for each in fetches:
        link.submit(each)
    assert link.cancel(fetches[1])
    arrived = [done.fetch.cause for _ in range(4) for done in link.wait()]
    assert arrived == [Cause.DEMAND, Cause.SATURATE, Cause.PREFETCH, Cause.PRIME]


def test_belady_is_the_known_optimum_of_a_textbook_sequence() -> None:
    pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]
    assert belady_misses([ExpertKey(0, page) for page in pages], num_slots=3) == 9
