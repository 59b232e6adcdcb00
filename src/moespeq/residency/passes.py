"""The values that pass between the engine and residency: kinds of pass, options, waves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Eviction", "PassKind", "ResidencyOptions", "Wave"]


class PassKind(Enum):
    """What the target pass is for: it decides where the lookahead comes from.

    DRAFT_VERIFY: draft steps predict, then k + 1 rows are verified. PLAIN: one row (k = 0), nothing is
    predicted or prefetched. PREFILL: many rows; what is foreseen, some experts or all, streams in layer order.
    """

    DRAFT_VERIFY = "draft_verify"
    PLAIN = "plain"
    PREFILL = "prefill"


class Eviction(Enum):
    """Which policy chooses victims: ours, then the baselines beside which it is measured.

    CHUNK decides the order of fetches too; see baselines.
    """

    NEXT_USE = "next_use"
    LRU = "lru"
    LFU = "lfu"
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class ResidencyOptions:
    """`lookahead_tok`: draft steps of a round that are fetched for, the first ones; None: all. What later ones name is
    fetched when its layer asks, and is a miss unless an earlier step named it too.

    `link_depth`: guesses are submitted while fewer fetches than this are under way.

    It should be what the link moves between two pumps, plus what it begins at once: with less the link runs dry. More
    delays no demand and moves nothing stale, since what has not begun is overtaken and taken back; but each fetch
    under way holds a slot, so more than a tenth of the slots costs hits.

    `wave_bytes`, `prefill_wave_bytes`: a wave has at least so many bytes of records while more of its layer's are on
    their way. A launch over few experts leaves most of a GPU idle, and costs the host as long as several copies take.
    """

    prefetch: bool = True
    link_depth: int = 4
    lookahead_tok: int | None = None
    eviction: Eviction = Eviction.NEXT_USE
    wave_bytes: int = 0
    prefill_wave_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wave:
    """Leases of one layer: the complete record of `experts[i]` lies in `slots[i]` until the wave is given back.

    base_rows[i]: where its base lies, a row of the bank, or -1: in its slot, in front of its residual.
    is_last: all other records of the layer were leased in earlier waves.
    """

    layer: int
    experts: Sequence[int]
    slots: Sequence[int]
    base_rows: Sequence[int]
    is_last: bool

    def __len__(self) -> int:
        return len(self.experts)
