"""What one generation measured, as it is written to JSON. A run that failed is a run with an error, not a gap.

Seconds come from the engine's own clock; decode is everything after the first token, so that
TPOT = decode_s / (new_tok - 1) and bytes a token leave the prefill out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moespeq.decode.engine import Engine
from moespeq.decode.statistics import GenerationStats
from moespeq.errors import MoespeqError

_COUNTS = ("k", "accepted", "committed", "hits", "late", "misses", "link_bytes")
_SECONDS = ("draft_s", "verify_s", "stall_s", "link_busy_s", "stall_busy_s")


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of one row. link: "as-is" or the paced bandwidth; figures are None where it failed."""

    row: str
    link: str
    prompt: int
    repetition: int
    prompt_tok: int
    error: str | None = None
    new_tok: int | None = None
    tokens_sha256: str | None = None
    ttft_s: float | None = None
    decode_s: float | None = None
    prefill_link_bytes: int | None = None
    prefill_used_bytes: int | None = None
    decode_link_bytes: int | None = None
    wasted_bytes: int | None = None
    bytes_by_cause: dict[str, int] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)


def measure(
    engine: Engine, tokens: Sequence[int], *, row: str, link: str, prompt: int, repetition: int, new_tok: int
) -> Run:
    """Generate exactly `new_tok` greedy tokens, end of sequence ignored."""
    try:
        result = engine.generate(list(tokens), max_new_tokens=new_tok, temperature=0.0, ignore_eos=True)
    except (MoespeqError, RuntimeError) as error:
        return Run(row, link, prompt, repetition, len(tokens), error=one_line(error))
    stats = result.stats
    prefill = stats.prefill
    return Run(
        row,
        link,
        prompt,
        repetition,
        stats.prompt_tok,
        new_tok=len(result.tokens),
        tokens_sha256=hash_tokens(result.tokens),
        ttft_s=stats.ttft_s,
        decode_s=stats.decode_s,
        prefill_link_bytes=prefill.link_bytes,
        prefill_used_bytes=prefill.used_bytes,
        decode_link_bytes=stats.link_bytes - prefill.link_bytes,
        wasted_bytes=stats.wasted_bytes,
        bytes_by_cause=dict(stats.bytes_by_cause),
        routes=stats.routes.to_json(),
        rounds=_round_arrays(stats),
    )


def hash_tokens(tokens: Sequence[int]) -> str:
    """Equal for equal token sequences; what runs are compared by."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def one_line(error: BaseException) -> str:
    """The first line of an error, with its type where nobody wrote a sentence."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if isinstance(error, MoespeqError) else f"{type(error).__name__}: {text}"


def _round_arrays(stats: GenerationStats) -> dict[str, list[Any]]:
    """One list a figure, an entry a round; microseconds are enough, and keep the file readable."""
    counts = {name: [getattr(report, name) for report in stats.reports] for name in _COUNTS}
    seconds = {name: [round(getattr(report, name), 6) for report in stats.reports] for name in _SECONDS}
    return {**counts, **seconds}
