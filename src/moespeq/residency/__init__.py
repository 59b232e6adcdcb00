"""Which experts are on the device, and what to move next: pure policy, no torch, no threads, no I/O."""

from moespeq.residency.base_rows import NO_ROW, ResidentBases, first_rows
from moespeq.residency.counters import ResidencyCounters
from moespeq.residency.draft_watch import DraftWatch
from moespeq.residency.governor import AmortizingDepth, FixedDepth, Governor, GovernorOptions
from moespeq.residency.manager import Residency
from moespeq.residency.passes import Eviction, PassKind, ResidencyOptions, Wave

__all__ = [
    "NO_ROW",
    "AmortizingDepth",
    "DraftWatch",
    "Eviction",
    "FixedDepth",
    "Governor",
    "GovernorOptions",
    "PassKind",
    "Residency",
    "ResidencyCounters",
    "ResidencyOptions",
    "ResidentBases",
    "Wave",
    "first_rows",
]
