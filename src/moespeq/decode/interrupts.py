"""Ctrl-C between rounds, never inside one: a round that is cut anywhere would leave slots pinned and records lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

__all__ = ["InterruptShield"]


class InterruptShield:
    """Holds back the first SIGINT inside the block, which `raise_pending` raises later; a second one goes through.

    Outside the main thread, and where somebody else handles SIGINT, it does nothing: no interrupt arrives there.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def raise_pending(self) -> None:
        """Raise the interrupt that was held back, if there is one."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hold)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True
