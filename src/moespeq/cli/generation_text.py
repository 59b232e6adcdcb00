"""What a generation took, in words; of what did not happen there is no figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moespeq.decode.statistics import GenerationStats

__all__ = ["rounds_text", "speed_text"]


def speed_text(tokens_per_s: float) -> str:
    """`12.3 tok/s`; a dash where prefill alone gave the answer."""
    return f"{tokens_per_s:.1f} tok/s" if tokens_per_s else "- tok/s"


def rounds_text(stats: GenerationStats) -> str:
    """What a round committed, and how much of the drafts was kept."""
    if not stats.rounds:
        return "no round was needed"
    drafts = "nothing drafted" if stats.acceptance is None else f"{stats.acceptance:.0%} of drafts accepted"
    return f"{stats.committed_per_round:.2f} committed a round, {drafts}"
