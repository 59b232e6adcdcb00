"""Somebody who hears of every pass of an engine, whatever text it is of: what a live view is made from.

An observer looks into one text and costs time; a spectator gets what was measured anyway. It is called on the engine's
thread, between two passes, so whatever it does is time of the engine's: microseconds, or text comes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moespeq.decode.link_meter import LinkUse
from moespeq.residency import Residency
from moespeq.types import StepReport

__all__ = ["PassSeen", "Spectator"]


@dataclass(frozen=True, slots=True)
class PassSeen:
    """A committed round, or the prefill of a text. Times are on the engine's clock.

    residency: to read until `hear_pass` returns, and by no other thread.
    """

    begin_s: float
    end_s: float
    is_prefill: bool
    report: StepReport
    link: LinkUse
    residency: Residency


class Spectator(Protocol):
    """Hears of passes; raises nothing."""

    def hear_pass(self, seen: PassSeen) -> None:
        """A pass is over. On the engine's thread."""
        ...
