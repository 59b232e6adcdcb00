"""Counters, gauges and histograms for Prometheus, under the names that vLLM has for them where it has.

The engine's thread counts; the event loop only prints. Everything of a round is counted when it is committed, so that a
long answer is seen while it grows. The registry is the server's own: two servers of a process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from moespeq.decode.engine import Engine
from moespeq.decode.generation import GenerationResult
from moespeq.errors import BudgetError, UsageError
from moespeq.types import StepReport

__all__ = ["ServerMetrics"]

_LATENCIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class ServerMetrics:
    """One server's. Methods may be called from any thread."""

    def __init__(self, num_running: Callable[[], int], num_waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._gauge("num_requests_running", "Requests the engine works on.").set_function(num_running)
        self._gauge("num_requests_waiting", "Requests in the queue.").set_function(num_waiting)
        self._finished = self._counter("request_success", "Complete answers.", ("finished_reason",))
        self._failed = self._counter("request_failure", "Requests that the engine failed.", ("reason",))
        self._engine = Info("moespeq:engine", "What is served, and how.", registry=self._registry)
        self._prompt_tok = self._counter("prompt_tokens", "Prompt tokens, cached ones among them.")
        self._queried_tok = self._counter("prefix_cache_queries", "Prompt tokens that were looked up.")
        self._cached_tok = self._counter("prefix_cache_hits", "Of those, tokens that needed no prefill.")
        self._new_tok = self._counter("generation_tokens", "Tokens generated.")
        self._ttft_s = self._seconds("time_to_first_token_seconds", "From arrival to the first token, queue included.")
        self._inter_token_s = self._seconds(
            "inter_token_latency_seconds", "Time per token after the first.", _TOKEN_LATENCIES_S
        )
        self._request_s = self._seconds("e2e_request_latency_seconds", "From arrival to the end of the last answer.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted.")
        self._drafted_tok = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted_tok = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens accepted, by position.", ("position",)
        )
        self._routes = self._counter(
            "draft_routes", "Routes that the draft foretold: exact, same_set, wrong.", ("match",)
        )
        self._depth = Histogram(
            "moespeq:spec_depth", "Tokens drafted a round.", buckets=_DEPTHS, registry=self._registry
        )
        self._prefill_s = self._seconds("prefill_seconds", "Computing a prompt.")
        self._draft_s = self._seconds("draft_seconds", "Drafting, a round.", _TOKEN_LATENCIES_S)
        self._verify_s = self._seconds("verify_seconds", "Verifying, a round.", _TOKEN_LATENCIES_S)
        self._stall_s = self._seconds("expert_stall_seconds", "Waiting for experts, a pass.", _TOKEN_LATENCIES_S)
        self._hits = self._counter("expert_cache_hits", "Experts that were resident when their layer asked.")
        self._late = self._counter("expert_cache_late", "Experts that were foretold and not there yet.")
        self._misses = self._counter("expert_cache_misses", "Experts that nobody had foretold.")
        self._moved_bytes = self._counter("expert_bytes", "Bytes that crossed the link.", ("cause",))
        self._wasted_bytes = self._counter("expert_wasted_bytes", "Bytes that were evicted before their first use.")
        self._link_busy_s = self._counter("link_busy_seconds", "Time in which the link moved bytes.")
        self._link = self._gauge("link_utilisation", "Share of the last pass in which the link moved bytes.")

    def describe(self, engine: Engine, model_name: str) -> None:
        """What is served; an engine that serves does not change."""
        options, record_bytes = engine.options, engine.record_bytes
        facts = {
            "model": model_name,
            "device": options.device,
            "records": options.records,
            "record_bytes": round(sum(record_bytes) / len(record_bytes)),
            "num_slots": engine.plan.num_slots,
            "rows": options.row_bucket,
            "k": options.k,
            "lookahead": options.lookahead_tok or "all",
        }
        self._engine.info({name: str(value) for name, value in facts.items()})

    def observe_prefill(self, report: StepReport, since_s: float, prompt_tok: int, cached_tok: int) -> None:
        """A prompt's first token is committed, `since_s` after the request's arrival."""
        self._new_tok.inc()
        self._prompt_tok.inc(prompt_tok)
        self._queried_tok.inc(prompt_tok)
        self._cached_tok.inc(cached_tok)
        self._ttft_s.observe(since_s)
        self._prefill_s.observe(report.verify_s)
        self._observe_experts(report)

    def observe_round(self, report: StepReport, num_tok: int, since_s: float) -> None:
        """A round was committed, `since_s` after the pass before it."""
        self._new_tok.inc(num_tok)
        self._observe_depth(report)
        for _ in range(num_tok):
            self._inter_token_s.observe(since_s / num_tok)
        self._observe_experts(report)

    def observe_end(self, result: GenerationResult) -> None:
        """An answer is complete."""
        self._finished.labels(result.finish_reason.value).inc()
        self._wasted_bytes.inc(result.stats.wasted_bytes)
        for match, count in result.stats.routes.to_json().items():
            self._routes.labels(match).inc(count)

    def count_failure(self, error: BaseException) -> None:
        """The engine failed a request, for want of memory or by a fault; a wrong request is its client's failure."""
        if not isinstance(error, UsageError):
            self._failed.labels("out_of_memory" if isinstance(error, BudgetError) else "engine_fault").inc()

    def observe_request(self, seconds: float) -> None:
        """All answers of a request are complete."""
        self._request_s.observe(seconds)

    def count_scored(self, prompt_tok: int) -> None:
        """A prompt was computed for its log-probabilities alone."""
        self._prompt_tok.inc(prompt_tok)

    def to_text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _observe_depth(self, report: StepReport) -> None:
        self._depth.observe(report.k)
        self._draft_s.observe(report.draft_s)
        self._verify_s.observe(report.verify_s)
        if report.k:
            self._drafts.inc()
            self._drafted_tok.inc(report.k)
            self._accepted_tok.inc(report.accepted)
            for position in range(report.accepted):
                self._accepted_at.labels(str(position)).inc()

    def _observe_experts(self, report: StepReport) -> None:
        self._hits.inc(report.hits)
        self._late.inc(report.late)
        self._misses.inc(report.misses)
        self._stall_s.observe(report.stall_s)
        for cause, moved_bytes in report.bytes_by_cause.items():
            self._moved_bytes.labels(cause.name.lower()).inc(moved_bytes)
        self._link_busy_s.inc(report.link_busy_s)
        pass_s = report.draft_s + report.verify_s
        self._link.set(min(1.0, report.link_busy_s / pass_s) if pass_s > 0 else 0.0)

    def _counter(self, name: str, told: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"moespeq:{name}", told, labels, registry=self._registry)

    def _gauge(self, name: str, told: str) -> Gauge:
        return Gauge(f"moespeq:{name}", told, registry=self._registry)

    def _seconds(self, name: str, told: str, buckets: tuple[float, ...] = _LATENCIES_S) -> Histogram:
        return Histogram(f"moespeq:{name}", told, buckets=buckets, registry=self._registry)
