"""What a generation counts: one record a round, and their sums as they are reported.

Nothing here decides anything; residency counts bytes and experts, the loop counts tokens and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moespeq.replay.route_match import Match, match_of
from moespeq.types import Cause, StepReport

__all__ = ["GenerationStats", "RouteFidelity", "summarize"]

Routes = Sequence[int]


@dataclass(slots=True)
class RouteFidelity:
    """How well the draft's routes foretold the target's, counted over (row, layer) pairs with equal input tokens.

    exact, same_set, wrong: how often each of `Match` came up.
    """

    exact: int = 0
    same_set: int = 0
    wrong: int = 0

    def compare(self, draft: Sequence[Sequence[Routes]], target: Sequence[Sequence[Routes]], rows: int) -> None:
        """draft [step][layer] and target [layer][row]; the first `rows` rows had the same tokens before them."""
        for layer, rows_of_layer in enumerate(target):
            for step, true in enumerate(rows_of_layer[:rows]):
                match match_of(draft[step][layer], true):
                    case Match.EXACT:
                        self.exact += 1
                    case Match.SAME_SET:
                        self.same_set += 1
                    case Match.WRONG:
                        self.wrong += 1

    def to_json(self) -> dict[str, int]:
        return {"exact": self.exact, "same_set": self.same_set, "wrong": self.wrong}


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """Sums over the rounds of one generation; bytes and experts include its prefill.

    reused_tok: of the prompt's tokens, those whose keys and values were in the cache already.
    """

    rounds: int
    drafted: int
    accepted: int
    committed: int
    prompt_tok: int
    reused_tok: int
    hits: int
    late: int
    misses: int
    link_bytes: int
    wasted_bytes: int
    bytes_by_cause: Mapping[str, int]
    rows: int
    seed: int
    ttft_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    stall_s: float
    link_busy_s: float
    stall_busy_s: float
    routes: RouteFidelity
    prefill: StepReport = field(repr=False)
    reports: tuple[StepReport, ...] = field(default=(), repr=False)

    @property
    def committed_per_round(self) -> float:
        """Tokens a round yields; 0 when prefill alone ended the generation."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens the target kept; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def k_per_round(self) -> tuple[int, ...]:
        """Tokens drafted, round by round."""
        return tuple(report.k for report in self.reports)

    @property
    def accepted_per_round(self) -> tuple[int, ...]:
        """Drafted tokens the target kept, round by round."""
        return tuple(report.accepted for report in self.reports)

    @property
    def stall_link_utilisation(self) -> float:
        """Share of the waiting during which the link moved bytes; 0 when nothing waited."""
        return self.stall_busy_s / self.stall_s if self.stall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, first token excluded."""
        return self.committed / self.decode_s if self.decode_s > 0 else 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "committed": self.committed,
            "acceptance": None if self.acceptance is None else round(self.acceptance, 4),
            "committed_per_round": round(self.committed_per_round, 4),
            "link_bytes": self.link_bytes,
            "link_bytes_by_cause": dict(self.bytes_by_cause),
            "hits": self.hits,
            "late": self.late,
            "misses": self.misses,
            "wasted_bytes": self.wasted_bytes,
            "rows": self.rows,
            "seed": self.seed,
            "prompt_tokens": self.prompt_tok,
            "reused_tokens": self.reused_tok,
            "ttft_s": round(self.ttft_s, 4),
            "decode_s": round(self.decode_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "draft_s": round(self.draft_s, 4),
            "verify_s": round(self.verify_s, 4),
            "stall_s": round(self.stall_s, 4),
            "link_busy_s": round(self.link_busy_s, 4),
            "stall_link_utilisation": round(self.stall_link_utilisation, 4),
            "routes": self.routes.to_json(),
            "k_per_round": list(self.k_per_round),
            "accepted_per_round": list(self.accepted_per_round),
        }


def summarize(
    reports: Sequence[StepReport],
    prefill: StepReport,
    *,
    wasted_bytes: int,
    rows: int,
    seed: int,
    prompt_tok: int,
    reused_tok: int,
    ttft_s: float,
    decode_s: float,
    routes: RouteFidelity,
) -> GenerationStats:
    """Sum the rounds; `prefill` adds its bytes, experts and stall, and no round."""
    everything = [prefill, *reports]
    by_cause = {
        cause.name.lower(): moved
        for cause in Cause
        if (moved := sum(report.bytes_by_cause.get(cause, 0) for report in everything))
    }
    return GenerationStats(
        rounds=len(reports),
        drafted=sum(report.k for report in reports),
        accepted=sum(report.accepted for report in reports),
        committed=sum(report.committed for report in reports),
        prompt_tok=prompt_tok,
        reused_tok=reused_tok,
        hits=sum(report.hits for report in everything),
        late=sum(report.late for report in everything),
        misses=sum(report.misses for report in everything),
        link_bytes=sum(report.link_bytes for report in everything),
        wasted_bytes=wasted_bytes,
        bytes_by_cause=by_cause,
        rows=rows,
        seed=seed,
        ttft_s=ttft_s,
        decode_s=decode_s,
        draft_s=sum(report.draft_s for report in reports),
        verify_s=sum(report.verify_s for report in reports),
        stall_s=sum(report.stall_s for report in everything),
        link_busy_s=sum(report.link_busy_s for report in everything),
        stall_busy_s=sum(report.stall_busy_s for report in everything),
        routes=routes,
        prefill=prefill,
        reports=tuple(reports),
    )
