"""A draft that ends early commits the same text, and an engine's governor is told what it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import flip_schedule, open_tight, prompts
from moespeq.decode.engine import Engine
from moespeq.residency import AmortizingDepth, DraftWatch, GovernorOptions
from moespeq.types import StepReport

K = 6


class StoppingDepth:
    """Drafts K tokens and ends each draft where told: behind 1, 2, ..., K tokens in turn; 0: audits only."""

    def __init__(self, *, is_audit: bool = False) -> None:
        self.reports: list[StepReport] = []
        self._is_audit = is_audit

    def choose(self, max_k: int) -> int:
        return min(K, max_k)

    def watch(self, k: int) -> DraftWatch:
        left = len(self.reports) % K + 1

        def goes_on(confidence: float) -> bool:
            nonlocal left
            assert 0.0 <= confidence <= 1.0
            left -= 1
            return left > 0

        return DraftWatch(None if self._is_audit else goes_on)

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.fixture(scope="module")
def engine(tiny_store: Path) -> Iterator[Engine]:
    with open_tight(tiny_store, 6, rows=17, k=K) as engine:
        yield engine


def use(engine: Engine, governor: StoppingDepth | AmortizingDepth) -> None:
    engine._parts.loop.use(governor)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3, "temperature": 0.0}],
    ids=["greedy", "sampled", "penalty"],
)
def test_drafts_that_end_anywhere_commit_the_text_of_plain_decoding(
    engine: Engine, sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts(1)
    engine.retune(k=0)
    plain = engine.generate(prompt, max_new_tokens=40, ignore_eos=True, **sampling).tokens
    flip_schedule(monkeypatch, K)
    engine.retune(k=K)
    use(engine, governor := StoppingDepth())
    assert engine.generate(prompt, max_new_tokens=40, ignore_eos=True, **sampling).tokens == plain
    depths = [report.k for report in governor.reports[:-1]]
    assert set(depths) == set(range(1, K + 1)), "every place to end was tried"
    assert all(len(report.confidences) == report.k for report in governor.reports)


def test_an_audited_draft_runs_to_its_end_and_tells_its_confidences(engine: Engine) -> None:
    engine.retune(k=K)
    use(engine, governor := StoppingDepth(is_audit=True))
    engine.generate(prompts(1)[0], max_new_tokens=20, ignore_eos=True, temperature=0.0)
    assert governor.reports[0].k == K
    assert len(governor.reports[0].confidences) == K
    assert all(0.0 < confidence <= 1.0 for confidence in governor.reports[0].confidences)


def test_routes_of_the_last_drafted_token_are_foretold_too(engine: Engine) -> None:
    engine.retune(k=K)
    use(engine, StoppingDepth())
    stats = engine.generate(prompts(1)[0], max_new_tokens=30, ignore_eos=True, temperature=0.0).stats
    pairs = stats.routes.exact + stats.routes.same_set + stats.routes.wrong
    drafted_rounds = [report for report in stats.reports if report.k]
    rows = sum(report.accepted + 1 for report in drafted_rounds)
    assert pairs == rows * engine.manifest.num_layers


def test_a_governed_engine_stops_no_draft_of_a_faithful_base(engine: Engine) -> None:
    engine.retune(k="auto")
    use(engine, governor := AmortizingDepth(GovernorOptions(k_max=K)))
    engine.generate(prompts(1)[0], max_new_tokens=60, ignore_eos=True, temperature=0.0)
    assert not governor.stops_drafts
