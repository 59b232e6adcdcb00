"""A recorded text cut into rounds of any depth: what a draft would have named, and what verify would have used.

The engine is exact, so text and true routes depend on no depth, and a round is known from where it starts and how far
it drafts. It starts at the last committed token, position p, drafts behind p, p + 1, ... and verifies the rows p to
p + k: accepted is the run of tokens the target agrees with from p on, and the next round starts behind the committed.

Whether a token is accepted depends a little on how many draft steps lie before it, whose keys and values the draft
wrote. So a recorded round's own verdict counts as far as it drafted at least as deep as is asked; elsewhere counts what
was recorded along the text.

Rows behind a rejection were computed from tokens that the text does not have. Nobody recorded their routes, so those of
the real text at the same positions stand in, for draft and target alike. Depths end where the text does, as an engine
cuts them at its limit; that it cuts them at the edges of length buckets too is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moespeq.replay.driver import RoundTrace
from moespeq.replay.routing_trace import RoutingTrace, TracePosition
from moespeq.replay.timing import ComputeTimes

__all__ = ["round_at", "rounds_of"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One round: rows `start` to `start + k`."""

    start: int
    k: int
    committed: int


def rounds_of(trace: RoutingTrace, k: int | None, times: ComputeTimes) -> list[RoundTrace]:
    """The rounds of depth `k`; 0: without a draft, None: those that were recorded."""
    cuts = _recorded_cuts(trace) if k is None else _cuts(_verdicts(trace, k), k)
    return [_round(trace, cut, times) for cut in cuts]


def round_at(trace: RoutingTrace, start: int, k: int, verdicts: Sequence[bool], times: ComputeTimes) -> RoundTrace:
    """The round of depth `k` from token `start` on, cut where the text ends; verdicts: is_accepted of every token.

    Verdicts may be others than the trace's, so here rows behind a rejection are those of another place in the text:
    with the text's own, a draft that is always wrong would still foretell what the next round needs.
    """
    cut, positions = _cut_at(verdicts, start, k), trace.positions
    elsewhere = start + len(positions) // 2
    strays = (positions[(elsewhere + step) % len(positions)] for step in range(cut.committed, cut.k + 1))
    return _round_over(trace, [*positions[start : start + cut.committed], *strays], cut, times)


def _recorded_cuts(trace: RoutingTrace) -> Iterator[_Cut]:
    start, last = 0, len(trace.positions) - 1
    for one in trace.rounds:
        yield _Cut(start, min(one.k, last - start), one.committed)
        start += one.committed


def _cuts(verdicts: Sequence[bool], k: int) -> Iterator[_Cut]:
    start, last = 0, len(verdicts) - 1
    while start < last:
        cut = _cut_at(verdicts, start, k)
        yield cut
        start += cut.committed


def _cut_at(verdicts: Sequence[bool], start: int, k: int) -> _Cut:
    depth = min(k, len(verdicts) - start - 2)
    accepted = next((step for step in range(depth) if not verdicts[start + step]), depth)
    return _Cut(start, depth, accepted + 1)


def _verdicts(trace: RoutingTrace, k: int) -> list[bool]:
    """Of every position: whether the target agrees with what a draft of depth `k` says behind it."""
    verdicts = [position.accepted for position in trace.positions]
    start = 0
    for one in trace.rounds:
        if one.k >= k:
            verdicts[start : start + one.accepted] = [True] * one.accepted
            is_cut = one.committed <= one.accepted  # by a stop or a limit: nothing was rejected
            if one.accepted < one.k and not is_cut:
                verdicts[start + one.accepted] = False
        start += one.committed
    return verdicts


def _round(trace: RoutingTrace, cut: _Cut, times: ComputeTimes) -> RoundTrace:
    return _round_over(trace, trace.positions[cut.start : cut.start + cut.k + 1], cut, times)


def _round_over(trace: RoutingTrace, rows: Sequence[TracePosition], cut: _Cut, times: ComputeTimes) -> RoundTrace:
    layers = range(trace.header.num_layers)
    true = [list(dict.fromkeys(expert for row in rows for expert in row.true[layer])) for layer in layers]
    return RoundTrace(
        draft=[row.draft for row in rows] if cut.k else [],
        true=true,
        committed=cut.committed,
        draft_step_s=times.draft_step_s,
        verify_layer_s=times.expert_s * sum(map(len, true)) / len(layers),
        dense_layer_s=times.dense_s / len(layers),
    )
