"""One scrape of a server's counters, and the signals between two of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moespeq.doctor.signals import Acceptance, QueueState, RouteCounts, Signals, name_for_commands

__all__ = ["Snapshot", "signals_between"]

_LEAST_DRAFTS = 12  # a window with fewer is too short: then the server's whole life counts

Sample = tuple[str, Mapping[str, str], float]
"""(name without its prefix, labels, value)"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """totals: by name, over all labels; engine: facts as labels; failures: by reason."""

    totals: Mapping[str, float]
    engine: Mapping[str, str]
    failures: Mapping[str, int]
    routes: Mapping[str, int]
    plain_rounds: int
    first_accepted: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Snapshot:
        """From the samples of a scrape."""
        totals: dict[str, float] = {}
        for name, _, value in samples:
            totals[name] = totals.get(name, 0.0) + value
        return cls(
            totals=totals,
            engine=next((labels for name, labels, _ in samples if name == "engine_info"), {}),
            failures={
                labels["reason"]: int(value) for name, labels, value in samples if name == "request_failure_total"
            },
            routes={labels["match"]: int(value) for name, labels, value in samples if name == "draft_routes_total"},
            plain_rounds=int(_labelled(samples, "spec_depth_bucket", "le", "0.0")),
            first_accepted=int(_labelled(samples, "spec_decode_num_accepted_tokens_per_pos_total", "position", "0")),
        )

    @property
    def acceptance(self) -> Acceptance:
        """Since the server began."""
        return Acceptance(
            drafts=self.count("spec_decode_num_drafts_total"),
            drafted_tok=self.count("spec_decode_num_draft_tokens_total"),
            accepted_tok=self.count("spec_decode_num_accepted_tokens_total"),
            first_accepted=self.first_accepted,
        )

    @property
    def pass_s(self) -> float:
        """Prefills, drafts and verifies together."""
        return sum(self.total(f"{name}_seconds_sum") for name in ("prefill", "draft", "verify"))

    def total(self, name: str) -> float:
        """0 for what the server has not counted yet."""
        return self.totals.get(name, 0.0)

    def count(self, name: str) -> int:
        return int(self.total(name))


def _labelled(samples: Sequence[Sample], name: str, label: str, value: str) -> float:
    return sum(number for one, labels, number in samples if one == name and labels.get(label) == value)


def signals_between(first: Snapshot, second: Snapshot, watch_s: float) -> Signals:
    """Of the window where it drafted enough, else of the server's whole life; the queue is the window's in any case."""
    recent = second.acceptance.since(first.acceptance)
    is_window = recent.drafts >= _LEAST_DRAFTS
    origin = first if is_window else Snapshot.of([])

    def moved(name: str) -> float:
        return second.total(name) - origin.total(name)

    return Signals(
        source=f"the last {watch_s:g} s" if is_window else "the server's life",
        model=name_for_commands(second.engine.get("model", "")),
        rounds=int(moved("spec_depth_count")),
        plain_rounds=second.plain_rounds - origin.plain_rounds,
        acceptance=second.acceptance.since(origin.acceptance),
        before=first.acceptance,
        recent=recent,
        hits=int(moved("expert_cache_hits_total")),
        late=int(moved("expert_cache_late_total")),
        misses=int(moved("expert_cache_misses_total")),
        link_bytes=int(moved("expert_bytes_total")),
        wasted_bytes=int(moved("expert_wasted_bytes_total")),
        pass_s=second.pass_s - origin.pass_s,
        draft_s=moved("draft_seconds_sum"),
        stall_s=moved("expert_stall_seconds_sum"),
        link_busy_s=moved("link_busy_seconds_total"),
        routes=_routes(origin, second),
        record_bytes=_number(second.engine.get("record_bytes")),
        device=second.engine.get("device"),
        k_asked=0 if second.engine.get("k") == "0" else second.engine.get("k"),
        lookahead_tok=None if not (lookahead := _number(second.engine.get("lookahead"))) else int(lookahead),
        queue=_queue(first, second),
        failures=second.failures,
    )


def _routes(first: Snapshot, second: Snapshot) -> RouteCounts:
    """Counted when an answer is complete."""
    counts = {match: count - first.routes.get(match, 0) for match, count in second.routes.items()}
    return RouteCounts(sum(counts.values()), counts.get("wrong", 0))


def _queue(first: Snapshot, second: Snapshot) -> QueueState:
    requests = second.total("e2e_request_latency_seconds_count")
    return QueueState(
        waiting=min(one.count("num_requests_waiting") for one in (first, second)),
        running=second.count("num_requests_running"),
        request_s=second.pass_s / requests if requests else None,
    )


def _number(text: str | None) -> float | None:
    return float(text) if text and text.replace(".", "", 1).isdigit() else None
