"""The amortization roofline as pure functions: the paper's (arXiv 2511.14102, section 5) beside ours.

p[j] is the chance that draft token j + 1 is accepted given that all before it were. The paper counts accepted
tokens and charges all new I/O serially; ours counts what is committed, the recovered or bonus token too, over
the round as measured.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "amortization_intensity",
    "expected_accepted",
    "expected_committed",
    "paper_cycle_s",
    "tokens_per_s",
]


def expected_accepted(p: Sequence[float]) -> float:
    """k_accept(k) = sum over i <= k of prod over j <= i of p_j, with k = len(p) (the paper's equation)."""
    total, survives = 0.0, 1.0
    for chance in p:
        survives *= chance
        total += survives
    return total


def expected_committed(p: Sequence[float]) -> float:
    """E[committed(k)] = k_accept(k) + 1: every round emits a recovered or bonus token too. 1 for k = 0."""
    return expected_accepted(p) + 1.0


def amortization_intensity(p: Sequence[float], *, tok_bytes: float, sync_bytes: float) -> float:
    """I_amort(k) = E[accepted] * S_token / E[bytes of synchronous I/O] (the paper's); inf when none waits."""
    if sync_bytes == 0.0:
        return float("inf")
    return expected_accepted(p) * tok_bytes / sync_bytes


def paper_cycle_s(*, draft_s: float, initial_io_s: float, new_io_s: float, verify_s: float) -> float:
    """T_cycle = max(T_draft(k), T_pcie,init) + T_pcie,new(k) + T_verify(k + 1) (the paper's equation)."""
    return max(draft_s, initial_io_s) + new_io_s + verify_s


def tokens_per_s(p: Sequence[float], *, draft_step_s: float, verify_s: float) -> float:
    """Theta(k) = E[committed(k)] / T_round(k), ours; `verify_s` with stalls, k tokens take k + 1 steps."""
    num_steps = len(p) + 1 if p else 0
    return expected_committed(p) / (num_steps * draft_step_s + verify_s)
