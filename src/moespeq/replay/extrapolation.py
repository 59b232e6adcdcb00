"""What a replay had to take on trust: figures of a setting that lie outside of what the recorded rounds measured.

Hits, waits and bytes are never among them: they come from the routes, which are the text's. Computing is: its times are
those of the recorded rounds, carried on along a straight line.
"""

from __future__ import annotations

from statistics import fmean

from moespeq.replay.rounds import rounds_of
from moespeq.replay.routing_trace import RoutingTrace
from moespeq.replay.timing import ComputeTimes
from moespeq.replay.what_if import Setting

__all__ = ["extrapolations"]


def extrapolations(trace: RoutingTrace, setting: Setting) -> list[str]:
    """A sentence for each; none where everything that `setting` asks for was measured."""
    depths = {one.k for one in trace.rounds}
    said = []
    if setting.k is not None:
        said += _draft(setting.k, depths) + _rows(trace, setting.k) + _experts(trace, setting.k)
    if max(setting.record_bytes) != max(trace.header.record_bytes):
        said.append("An expert of these records takes as long to compute as one of the recorded form.")
    return said


def _draft(k: int, depths: set[int]) -> list[str]:
    if k and not any(depths):
        return ["No recorded round drafted: a draft step takes what it took along the finished text."]
    if k > max(depths):
        return [f"Behind draft step {max(depths)} a token counts as accepted where a draft along the text was right."]
    return []


def _rows(trace: RoutingTrace, k: int) -> list[str]:
    rows = trace.header.options.get("rows")
    if rows is None or k < rows:
        return []
    return [f"A pass of {k + 1} rows takes as long as one of the recorded {rows} rows, its experts apart."]


def _experts(trace: RoutingTrace, k: int) -> list[str]:
    """Of layers that ask for more or fewer experts than any that was timed."""
    asked = [experts for one in trace.rounds for experts in one.layer_experts]
    if not asked:
        return []
    rounds = rounds_of(trace, k, ComputeTimes.of(trace))
    mean = fmean(len(experts) for one in rounds for experts in one.true)
    least, most = min(asked), max(asked)
    if least == most:
        if mean == most:
            return []
        return [
            f"A layer asks for {mean:.1f} experts and always asked for {most}: "
            f"half of its time is taken to grow with them."
        ]
    if least <= mean <= most:
        return []
    return [f"A layer asks for {mean:.1f} experts, and times were measured from {least} to {most}."]
