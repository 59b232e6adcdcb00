"""The queue behind every stage of a record's way."""

from __future__ import annotations

import random
import threading

from moespeq.transfer.urgency_queue import UrgencyQueue


def drained(queue: UrgencyQueue[str]) -> list[str]:
    """Everything left, in the order threads would get it."""
    queue.close()
    items = []
    while (item := queue.take()) is not None:
        items.append(item)
    return items


def test_the_most_urgent_comes_first_and_equals_in_the_order_they_came() -> None:
    queue: UrgencyQueue[str] = UrgencyQueue()
    for item, urgency in (("c", 3), ("a", 0), ("d", 3), ("b", 0)):
        queue.put(item, urgency)
    assert drained(queue) == ["a", "b", "c", "d"]


def test_an_item_put_again_moves_forward_and_never_back() -> None:
    queue: UrgencyQueue[str] = UrgencyQueue()
    for item, urgency in (("a", 5), ("b", 5), ("c", 1), ("b", 0), ("c", 5)):
        queue.put(item, urgency)
    assert len(queue) == 3
    assert drained(queue) == ["b", "c", "a"]


def test_what_was_taken_back_is_never_given_out() -> None:
    queue: UrgencyQueue[str] = UrgencyQueue()
    for item in "abc":
        queue.put(item, 0)
    assert queue.cancel("b")
    assert not queue.cancel("b")
    assert queue.take() == "a"
    assert not queue.cancel("a"), "already given out"
    queue.put("b", 0)
    assert drained(queue) == ["c", "b"]


def test_a_cleared_queue_is_empty_and_usable() -> None:
    queue: UrgencyQueue[str] = UrgencyQueue()
    for item in "ab":
        queue.put(item, 0)
    assert sorted(queue.clear()) == ["a", "b"]
    queue.put("c", 0)
    assert drained(queue) == ["c"]


def test_closing_wakes_every_waiting_thread() -> None:
    queue: UrgencyQueue[str] = UrgencyQueue()
    got: list[str | None] = []
    threads = [threading.Thread(target=lambda: got.append(queue.take())) for _ in range(4)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(timeout=10)
    assert got == [None] * 4


def test_many_threads_get_every_item_that_was_not_taken_back_exactly_once() -> None:
    queue: UrgencyQueue[int] = UrgencyQueue()
    got: list[int] = []
    taken_back: list[int] = []

    def work() -> None:
        while (item := queue.take()) is not None:
            got.append(item)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    rng = random.Random(3)
    for item in range(2000):
        queue.put(item, rng.randrange(4))
        if rng.random() < 0.3 and queue.cancel(target := rng.randrange(item + 1)):
            taken_back.append(target)
    queue.close()
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(got + taken_back) == list(range(2000))
