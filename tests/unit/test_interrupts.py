"""Ctrl-C is held back while a round runs and raised between rounds."""

from __future__ import annotations

import signal
import threading

import pytest

from moespeq.decode.interrupts import InterruptShield


def test_interrupt_inside_the_block_is_raised_after_it() -> None:
    shield = InterruptShield()
    with shield:
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        shield.raise_pending()
    shield.raise_pending()


def test_second_interrupt_goes_through_at_once() -> None:
    shield = InterruptShield()
    with shield:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handler_is_restored_after_the_block_even_when_it_fails() -> None:
    with pytest.raises(ValueError, match="round"), InterruptShield():
        raise ValueError("round")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handler_of_somebody_else_is_left_alone() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with InterruptShield():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [signal.SIGINT]


def test_other_threads_are_not_shielded_and_do_not_fail() -> None:
    entered = []

    def work() -> None:
        with InterruptShield():
            entered.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]
