"""What a policy would have cost: recorded routes on a virtual clock."""

from moespeq.replay.bound import belady_misses
from moespeq.replay.driver import ReplayResult, RoundTrace, Trace, replay
from moespeq.replay.routing_trace import RoutingTrace, TraceHeader, TracePosition, TraceRound
from moespeq.replay.virtual import LinkModel, VirtualClock, VirtualMover

__all__ = [
    "LinkModel",
    "ReplayResult",
    "RoundTrace",
    "RoutingTrace",
    "Trace",
    "TraceHeader",
    "TracePosition",
    "TraceRound",
    "VirtualClock",
    "VirtualMover",
    "belady_misses",
    "replay",
]
