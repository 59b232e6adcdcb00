"""What a server or a recorded run says of its decoding, in one form: the checks need not know where it is from.

None: this source does not say. Sums are over the window that was watched, or where that saw too little, over all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Acceptance", "Kept", "QueueState", "RouteCounts", "Signals", "name_for_commands"]


def name_for_commands(name: str) -> str:
    """A hub id as it is; another name is not where its model lies, so a command cannot take it."""
    return name if "/" in name else "MODEL"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """first_accepted: of the drafts, those whose first token was kept: a figure that does not depend on k."""

    drafts: int
    drafted_tok: int
    accepted_tok: int
    first_accepted: int

    @property
    def first_share(self) -> float:
        """Of drafts whose first token was kept; 0 without any."""
        return self.first_accepted / self.drafts if self.drafts else 0.0

    @classmethod
    def of(cls, drafted: Sequence[int], accepted: Sequence[int]) -> Acceptance:
        """Of rounds; those that drafted nothing do not count."""
        rounds = [(k, kept) for k, kept in zip(drafted, accepted, strict=True) if k]
        return cls(
            drafts=len(rounds),
            drafted_tok=sum(k for k, _ in rounds),
            accepted_tok=sum(kept for _, kept in rounds),
            first_accepted=sum(kept > 0 for _, kept in rounds),
        )

    def since(self, earlier: Acceptance) -> Acceptance:
        """What came after `earlier`."""
        return Acceptance(
            self.drafts - earlier.drafts,
            self.drafted_tok - earlier.drafted_tok,
            self.accepted_tok - earlier.accepted_tok,
            self.first_accepted - earlier.first_accepted,
        )


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """Of (row, layer) pairs whose input tokens draft and target shared; wrong: the draft foretold another expert."""

    total: int
    wrong: int

    @property
    def wrong_share(self) -> float:
        return self.wrong / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Of drafted tokens before which all were kept: how many were, out of how many."""

    num: int
    total: int

    @property
    def share(self) -> float:
        return self.num / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class QueueState:
    """Of a server. waiting: the fewest seen while it was watched; request_s: the engine's mean time for one."""

    waiting: int
    running: int
    request_s: float | None


@dataclass(frozen=True, slots=True)
class Signals:
    """source: for people; model: for commands, "MODEL" where nobody knows what was loaded.

    before, recent: two stretches to compare. kept_in_rounds, kept_on_text: in the rounds, and along the finished text.
    record_bytes: of one copy. echo_logprob_gap: how far
    log-probabilities of an answer's tokens, as it was decoded, lay from those of one prefill of the same text;
    echo_refusal: why nobody looked. k_asked, lookahead_tok: options in effect; "auto" and None are no bounds.
    """

    source: str
    model: str
    rounds: int
    plain_rounds: int
    acceptance: Acceptance
    hits: int
    late: int
    misses: int
    link_bytes: int
    wasted_bytes: int
    pass_s: float
    draft_s: float
    stall_s: float
    link_busy_s: float | None = None
    before: Acceptance | None = None
    recent: Acceptance | None = None
    routes: RouteCounts | None = None
    kept_in_rounds: Kept | None = None
    kept_on_text: Kept | None = None
    record_bytes: float | None = None
    device: str | None = None
    k_asked: int | str | None = None
    lookahead_tok: int | None = None
    echo_logprob_gap: float | None = None
    echo_refusal: str | None = None
    queue: QueueState | None = None
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """Experts that layers asked for."""
        return self.hits + self.late + self.misses
