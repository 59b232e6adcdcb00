"""Real time, for everything that takes a Clock."""

from __future__ import annotations

import time

__all__ = ["MonotonicClock"]


class MonotonicClock:
    """Seconds that never go back; differences are meaningful, the value is not."""

    def now_s(self) -> float:
        return time.perf_counter()
