"""Bytes in motion: the movers and record sources that carry experts into slots."""

from moespeq.transfer.arena import SlotArena, slot_stride_bytes
from moespeq.transfer.clock import MonotonicClock
from moespeq.transfer.host_cache import HostCache, HostCacheCounters
from moespeq.transfer.paced_source import PacedSource
from moespeq.transfer.thread_mover import ThreadMover

__all__ = [
    "HostCache",
    "HostCacheCounters",
    "MonotonicClock",
    "PacedSource",
    "SlotArena",
    "ThreadMover",
    "slot_stride_bytes",
]
