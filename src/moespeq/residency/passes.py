"""The values that pass between the engine and residency: kinds of pass, options, leases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moespeq.types import ExpertKey

__all__ = ["Eviction", "Lease", "PassKind", "ResidencyOptions"]


class PassKind(Enum):
    """What the target pass is for: it decides where the lookahead comes from.

    DRAFT_VERIFY: draft steps predict, then k + 1 rows are verified. PLAIN: one row (k = 0), nothing is
    predicted or prefetched. PREFILL: many rows, every expert is expected and records stream in layer order.
    """

    DRAFT_VERIFY = "draft_verify"
    PLAIN = "plain"
    PREFILL = "prefill"


class Eviction(Enum):
    """Which policy chooses victims."""

    NEXT_USE = "next_use"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """`link_depth`: speculative fetches in flight at once, enough to keep the link busy between two pumps."""

    prefetch: bool = True
    link_depth: int = 2
    eviction: Eviction = Eviction.NEXT_USE


@dataclass(frozen=True, slots=True)
class Lease:
    """The complete record `key` lies in `slot`, and stays there until its wave is given back."""

    key: ExpertKey
    slot: int
