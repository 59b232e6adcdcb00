"""Bytes in motion: the movers and record sources that carry experts into slots."""

from moespeq.transfer.arena import SlotArena, slot_stride_bytes
from moespeq.transfer.clock import MonotonicClock
from moespeq.transfer.copy_stream import CopyStream, CudaCopyStream
from moespeq.transfer.cuda_mover import CudaMover
from moespeq.transfer.host_cache import HostCache, HostCacheCounters
from moespeq.transfer.host_places import host_arena_bytes
from moespeq.transfer.host_records import HostCounters, HostRecords
from moespeq.transfer.moves import Move
from moespeq.transfer.paced_source import PacedSource
from moespeq.transfer.pinned_arena import PinnedArena
from moespeq.transfer.pinning import CudaPinning, HostPinning
from moespeq.transfer.plain_source import PlainSource, plain_record_bytes
from moespeq.transfer.thread_mover import ThreadMover
from moespeq.transfer.verification import check_records, spread

__all__ = [
    "CopyStream",
    "CudaCopyStream",
    "CudaMover",
    "CudaPinning",
    "HostCache",
    "HostCacheCounters",
    "HostCounters",
    "HostPinning",
    "HostRecords",
    "MonotonicClock",
    "Move",
    "PacedSource",
    "PinnedArena",
    "PlainSource",
    "SlotArena",
    "ThreadMover",
    "check_records",
    "host_arena_bytes",
    "plain_record_bytes",
    "slot_stride_bytes",
    "spread",
]
