"""What residency counts. Totals since the start; a pass is the difference of two snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moespeq.types import Cause

__all__ = ["ResidencyCounters"]


@dataclass(frozen=True, slots=True)
class ResidencyCounters:
    """Hits, late and misses count distinct experts a layer; bytes count when they have arrived.

    When its layer asks, a hit is complete in its slot. `late` was foretold by the lookahead or is on its way, and is
    not there: the link's fault. A miss was foretold by nobody: the prediction's fault, or there was none.

    `wasted_bytes` arrived and were evicted before their first use. `stall_s` is time the caller's thread was
    blocked on the link with nothing ready to compute. `failed` fetches delivered nothing; those `taken_back` were
    cancelled before they began, to go out again as demand or because nobody needs them any more.
    """

    hits: int = 0
    late: int = 0
    misses: int = 0
    failed: int = 0
    taken_back: int = 0
    bytes_by_cause: Mapping[Cause, int] = field(default_factory=dict)
    used_bytes: int = 0
    wasted_bytes: int = 0
    stall_s: float = 0.0

    @property
    def link_bytes(self) -> int:
        """Bytes that crossed the link, whatever the cause."""
        return sum(self.bytes_by_cause.values())

    def since(self, earlier: ResidencyCounters) -> ResidencyCounters:
        """What happened after `earlier`, an older snapshot of the same object."""
        moved = {cause: n - earlier.bytes_by_cause.get(cause, 0) for cause, n in self.bytes_by_cause.items()}
        return ResidencyCounters(
            hits=self.hits - earlier.hits,
            late=self.late - earlier.late,
            misses=self.misses - earlier.misses,
            failed=self.failed - earlier.failed,
            taken_back=self.taken_back - earlier.taken_back,
            bytes_by_cause={cause: num_bytes for cause, num_bytes in moved.items() if num_bytes},
            used_bytes=self.used_bytes - earlier.used_bytes,
            wasted_bytes=self.wasted_bytes - earlier.wasted_bytes,
            stall_s=self.stall_s - earlier.stall_s,
        )
