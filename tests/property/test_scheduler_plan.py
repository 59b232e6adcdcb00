"""The scheduler never sorts everything anew; what it hands out is what the plain function of lookahead, cache and phase
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from moespeq.residency.frequency import UseFrequency
from moespeq.residency.lookahead import ExpertLookahead
from moespeq.residency.scheduler import Scheduler
from moespeq.residency.slots import SlotCache

NUM_LAYERS, NUM_EXPERTS, NUM_STEPS = 3, 5, 4
RECORDS = range(NUM_LAYERS * NUM_EXPERTS)


def plan(lookahead: ExpertLookahead, cache: SlotCache, frequency: UseFrequency) -> list[int]:
    """Every predicted and missing record: by the layer that asks first, inside it the most expected, then the most
    frequent; then by id.
    """
    uses = {record: n for layer in range(NUM_LAYERS) for record, n in lookahead.expected_uses(layer).items()}
    missing = [record for record in uses if not cache.holds(record)]
    return sorted(missing, key=lambda record: (record // NUM_EXPERTS, -uses[record], -frequency.score[record], record))


routes = st.lists(
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=2, max_size=4), min_size=NUM_LAYERS, max_size=NUM_LAYERS
)
commands = st.lists(
    st.one_of(
        st.tuples(st.just("step"), routes),
        st.tuples(st.just("fetch"), st.integers(1, 3)),
        st.tuples(st.just("arrive"), st.integers(1, 3)),
        st.tuples(st.just("evict"), st.sampled_from(RECORDS)),
        st.tuples(st.just("take back"), st.sampled_from(RECORDS)),
        st.tuples(st.just("ask"), st.none()),
    ),
    max_size=25,
)


class Bench:
    def __init__(self, record_bytes: list[int], scores: list[int], *, is_draft: bool) -> None:
        self.cache = SlotCache(len(RECORDS), record_bytes, num_experts=NUM_EXPERTS)
        self.lookahead = ExpertLookahead(NUM_LAYERS, NUM_EXPERTS)
        self.frequency = UseFrequency(len(RECORDS))
        for record, score in zip(RECORDS, scores, strict=True):
            self.frequency.touch([record] * score)
        self.scheduler = Scheduler(self.cache, self.lookahead, self.frequency)
        self.scheduler.begin(is_draft=is_draft, num_draft_steps=NUM_STEPS)
        self.is_draft = is_draft

    def do(self, name: str, value: object) -> None:
        if name == "step" and self.lookahead.front == 0:
            assert isinstance(value, list)
            self.predict(value)
        elif name == "fetch":
            assert isinstance(value, int)
            for _ in range(value):
                self.fetch_next()
        elif name == "arrive":
            assert isinstance(value, int)
            for record in list(self.cache.submitted)[:value]:
                self.cache.complete(record)
        elif name == "evict" and value in self.cache.resident:
            assert isinstance(value, int)
            self.lose(value, self.cache.evict)
        elif name == "take back" and value in self.cache.submitted:
            assert isinstance(value, int)
            self.lose(value, self.cache.abandon)
        elif name == "ask" and self.lookahead.front < NUM_LAYERS:
            self.lookahead.retire(self.lookahead.front)

    def predict(self, routes: list[list[int]]) -> None:
        """A draft step names experts, or a prefill foresees them layer by layer."""
        if self.is_draft:
            self.lookahead.add(routes)
            return
        for layer, experts in enumerate(routes):
            self.lookahead.expect(layer, [experts])
            self.scheduler.reopen(layer)

    def lose(self, record: int, by: Callable[[int], None]) -> None:
        """While the draft runs nothing that it named is evicted or taken back."""
        if not (self.is_draft and self.lookahead.front == 0 and self.lookahead.has_use(record)):
            by(record)
            self.scheduler.reopen(record // NUM_EXPERTS)

    def fetch_next(self) -> int | None:
        record = self.scheduler.next()
        if record is not None:
            self.cache.reserve(record, self.scheduler.cause)
        return record

    def rest(self) -> Iterator[int]:
        while (record := self.fetch_next()) is not None:
            yield record


@given(
    st.lists(st.integers(1, 3), min_size=len(RECORDS), max_size=len(RECORDS)),
    st.lists(st.integers(0, 2), min_size=len(RECORDS), max_size=len(RECORDS)),
    st.booleans(),
    routes,
    commands,
)
def test_the_scheduler_hands_out_what_the_plain_function_says(
    record_bytes: list[int], scores: list[int], is_draft: bool, first: list[list[int]], done: list[tuple[str, object]]
) -> None:
    bench = Bench(record_bytes, scores, is_draft=is_draft)
    for name, value in [("step", first), *done]:
        bench.do(name, value)
    expected = plan(bench.lookahead, bench.cache, bench.frequency)
    assert list(bench.rest()) == expected
