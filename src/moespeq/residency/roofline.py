"""The amortization roofline as pure functions: the paper's (arXiv 2511.14102, section 5) beside ours, from equal
measurements.

p[j] is the chance that draft token j + 1 is accepted given that all before it were. The paper counts accepted tokens
and charges what the link brings after the draft in full; ours counts what is committed, the recovered or bonus token
too, over the round as it was measured, so what a verify hides of the link costs nothing. Intensity is tokens times
S_token, the bytes of the experts of one token, over the bytes that were waited for: how many tokens a byte serves.
Bytes a second over S_token is the slope of the I/O roof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "RooflinePoint",
    "RoundCosts",
    "amortization_intensity",
    "best_depth",
    "expected_accepted",
    "paper_best_depth",
    "paper_cycle_s",
    "paper_tokens_per_s",
    "roofline_point",
    "tokens_per_s",
]


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """A round of depth k on average. compute_s: of the verify, without stall_s, its waits for the link.

    early_io_s, late_io_s: link time of what was asked for while drafting, and of what was asked for while verifying.
    """

    draft_s: float
    compute_s: float
    stall_s: float
    early_io_s: float
    late_io_s: float

    @property
    def round_s(self) -> float:
        """T_round(k)."""
        return self.draft_s + self.compute_s + self.stall_s


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One depth by both reckonings. unstalled_tokens_per_s: if nothing had been waited for, its compute roof."""

    k: int
    committed: float
    intensity: float
    tokens_per_s: float
    unstalled_tokens_per_s: float
    paper_intensity: float
    paper_tokens_per_s: float


def expected_accepted(p: Sequence[float]) -> list[float]:
    """k_accept(k) = sum over i <= k of prod over j <= i of p_j (the paper's), for k = 0..len(p)."""
    accepted, survives = [0.0], 1.0
    for chance in p:
        survives *= chance
        accepted.append(accepted[-1] + survives)
    return accepted


def tokens_per_s(p: Sequence[float], round_s: Sequence[float]) -> list[float]:
    """Theta(k) = E[committed(k)] / T_round(k), ours, for k = 0..len(p).

    E[committed(k)] = k_accept(k) + 1: every round emits a recovered or bonus token too.
    """
    return [(accepted + 1.0) / seconds for accepted, seconds in zip(expected_accepted(p), round_s, strict=True)]


def paper_tokens_per_s(p: Sequence[float], cycle_s: Sequence[float]) -> list[float]:
    """Theta(k) = k_accept(k) / T_cycle(k), the paper's, for k = 0..len(p)."""
    return [accepted / seconds for accepted, seconds in zip(expected_accepted(p), cycle_s, strict=True)]


def amortization_intensity(num_tok: float, *, tok_bytes: float, sync_bytes: float) -> float:
    """I_amort(k) = tokens * S_token / bytes of synchronous I/O, of a round on average; inf when none waits."""
    return num_tok * tok_bytes / sync_bytes if sync_bytes else math.inf


def paper_cycle_s(*, draft_s: float, initial_io_s: float, new_io_s: float, verify_s: float) -> float:
    """T_cycle = max(T_draft(k), T_pcie,init) + T_pcie,new(k) + T_verify(k + 1) (the paper's equation)."""
    return max(draft_s, initial_io_s) + new_io_s + verify_s


def roofline_point(
    k: int, committed: float, costs: RoundCosts, *, tok_bytes: float, link_bytes_per_s: float
) -> RooflinePoint:
    """Depth k by both reckonings; committed: tokens a round, of which the paper counts all but one."""
    cycle_s = paper_cycle_s(
        draft_s=costs.draft_s,
        initial_io_s=costs.early_io_s,
        new_io_s=costs.late_io_s,
        verify_s=costs.compute_s,
    )
    accepted, stall_bytes = committed - 1.0, costs.stall_s * link_bytes_per_s
    late_bytes = costs.late_io_s * link_bytes_per_s
    return RooflinePoint(
        k=k,
        committed=committed,
        intensity=amortization_intensity(committed, tok_bytes=tok_bytes, sync_bytes=stall_bytes),
        tokens_per_s=committed / costs.round_s,
        unstalled_tokens_per_s=committed / (costs.draft_s + costs.compute_s),
        paper_intensity=amortization_intensity(accepted, tok_bytes=tok_bytes, sync_bytes=late_bytes),
        paper_tokens_per_s=accepted / cycle_s,
    )


def best_depth(points: Sequence[RooflinePoint]) -> int:
    """k* = argmax Theta(k), ours; the shallower of two equals."""
    return max(points, key=lambda point: (point.tokens_per_s, -point.k)).k


def paper_best_depth(points: Sequence[RooflinePoint]) -> int:
    """k* by the paper's Theta(k), which is 0 at k = 0: it always drafts where anything is accepted."""
    return max(points, key=lambda point: (point.paper_tokens_per_s, -point.k)).k
