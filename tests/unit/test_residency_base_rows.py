"""Rows of the base bank go to the hottest experts, a few a pass, and no record in a slot ever loses its base.

Records of the rig have 100 + expert bytes, 40 of them the base in front.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moespeq.errors import StorageError
from moespeq.residency import NO_ROW, PassKind, ResidencyOptions, ResidentBases, first_rows
from moespeq.residency.base_rows import row_changes
from moespeq.residency.frequency import UseFrequency
from moespeq.types import Cause, ExpertKey
from residency_rig import NUM_EXPERTS, NUM_LAYERS, Rig

BASE_BYTES = 40


class Bank:
    """Remembers what was written into its rows; refuses experts that are `broken`."""

    def __init__(self, num_rows: int) -> None:
        self.rows = first_rows(num_rows, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
        self.changes: list[tuple[int, ExpertKey, ExpertKey]] = []
        self.broken: set[ExpertKey] = set()

    def replace(self, row: int, leaves: ExpertKey, comes: ExpertKey) -> None:
        if comes in self.broken:
            raise StorageError("The disk is gone; plug it in.")
        self.changes.append((row, leaves, comes))

    def rig(self, num_slots: int, **options: bool) -> Rig:
        bases = ResidentBases(self.rows, lambda key: BASE_BYTES, self.replace)
        return Rig(num_slots, ResidencyOptions(**options), bases=bases)


def rows_of(rig: Rig) -> list[int]:
    return rig.residency._base_rows._rows


def pass_over(rig: Rig, *experts: int, layer: int = 0) -> list[int]:
    """One plain pass that uses experts of one layer; where their bases were."""
    rig.residency.begin_pass(PassKind.PLAIN)
    rows = []
    for wave in rig.residency.acquire(layer, experts):
        rig.residency.pump()
        rows += wave.base_rows
    rig.residency.end_pass(1)
    rig.residency.check()
    return rows


@pytest.mark.parametrize("num_rows", [0, 1, 5, 8, 31, 32])
def test_at_first_every_layer_has_as_many_rows_as_any_other(num_rows: int) -> None:
    rows = first_rows(num_rows, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
    assert [row for row in rows if row != NO_ROW] == list(range(num_rows))
    in_layer = [sum(row != NO_ROW for row in rows[at : at + NUM_EXPERTS]) for at in range(0, len(rows), NUM_EXPERTS)]
    assert max(in_layer) - min(in_layer) <= 1


def frequency_of(*uses: int) -> UseFrequency:
    frequency = UseFrequency(len(uses))
    for record, count in enumerate(uses):
        for _ in range(count):
            frequency.touch([record])
    return frequency


def test_the_hottest_outside_takes_the_row_of_the_coldest_inside() -> None:
    frequency = frequency_of(3, 1, 9, 20, 0)
    assert row_changes([3, 4], [0, 1, 2], frequency, at_most=8) == [(1, 3)]
    assert row_changes([2, 3, 4], [0, 1], frequency, at_most=8) == [(1, 3), (0, 2)]
    assert row_changes([2, 3, 4], [0, 1], frequency, at_most=1) == [(1, 3)]


@pytest.mark.parametrize(("inside", "outside"), [(0, 1), (2, 4), (10, 16), (5, 5)])
def test_an_expert_that_is_only_a_little_hotter_takes_nobodys_row(inside: int, outside: int) -> None:
    assert row_changes([1], [0], frequency_of(inside, outside), at_most=8) == []


@pytest.mark.parametrize(("inside", "outside"), [(0, 2), (2, 5), (10, 17)])
def test_an_expert_that_is_clearly_hotter_takes_a_row(inside: int, outside: int) -> None:
    assert row_changes([1], [0], frequency_of(inside, outside), at_most=8) == [(0, 1)]


def test_the_link_carries_the_base_of_exactly_those_that_have_no_row() -> None:
    rig = Bank(2 * NUM_LAYERS).rig(8)
    assert pass_over(rig, 1, 5) == [1, NO_ROW]
    assert [fetch.num_bytes for fetch in rig.mover.submitted] == [101 - BASE_BYTES, 105]
    assert rig.residency.counters().used_bytes == 206 - BASE_BYTES


def test_without_bases_every_record_is_complete() -> None:
    rig = Rig(8)
    assert pass_over(rig, 1, 5) == [0, 0]
    assert [fetch.num_bytes for fetch in rig.mover.submitted] == [101, 105]


def test_a_record_that_needs_no_base_is_not_said_to_carry_one() -> None:
    """Plain records without a draft: kernels would look for the record behind a base that is not there."""
    no_rows = [NO_ROW] * (NUM_LAYERS * NUM_EXPERTS)
    rig = Rig(4, ResidencyOptions(), bases=ResidentBases(no_rows, lambda key: 0))
    assert pass_over(rig, 0, 3) == [0, 0]


def test_an_expert_used_often_gets_the_row_of_one_never_used_and_then_moves_less() -> None:
    bank = Bank(NUM_LAYERS)
    rig = bank.rig(1)
    for _ in range(3):
        assert pass_over(rig, 6, 7) == [NO_ROW, NO_ROW]
        if bank.changes:
            break
    row, leaves, comes = bank.changes[0]
    assert comes in (ExpertKey(0, 6), ExpertKey(0, 7))
    assert rows_of(rig)[leaves.layer * NUM_EXPERTS + leaves.expert] == NO_ROW
    assert rows_of(rig)[comes.expert] == row
    assert rig.residency.counters().bytes_by_cause[Cause.BASE] == BASE_BYTES * len(bank.changes)
    pass_over(rig, 0)  # one slot: both leave it
    assert pass_over(rig, comes.expert) == [row]
    assert rig.mover.submitted[-1].num_bytes == 100 + comes.expert - BASE_BYTES


def test_a_record_that_brought_its_base_keeps_it_when_it_gets_a_row() -> None:
    bank = Bank(NUM_LAYERS)
    rig = bank.rig(8)
    while not bank.changes:
        assert pass_over(rig, 6) == [NO_ROW]
    assert rows_of(rig)[6] != NO_ROW
    assert pass_over(rig, 6) == [NO_ROW]
    assert len(rig.mover.submitted) == 1


def test_the_row_of_a_record_in_a_slot_is_not_given_away_until_it_leaves() -> None:
    bank = Bank(1)  # that of expert 0
    rig = bank.rig(2)
    pass_over(rig, 0)
    for _ in range(20):
        pass_over(rig, 5)
    assert bank.changes == []
    assert pass_over(rig, 0) == [0]
    pass_over(rig, 5, 6)  # two slots: it leaves
    assert bank.changes == [(0, ExpertKey(0, 0), ExpertKey(0, 5))]


def test_a_base_on_its_way_with_its_record_is_not_fetched_beside_it() -> None:
    bank = Bank(NUM_LAYERS)
    rig = bank.rig(8)
    hot = 3 * NUM_EXPERTS + 7
    rig.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=1)
    rig.predict((3, 7))
    rig.residency._frequency.touch([hot] * 5)
    rig.residency.end_pass(1)
    assert hot in rig.residency.cache.submitted
    assert bank.changes == []
    rig.residency.settle()
    pass_over(rig, 0)
    assert [comes for _, _, comes in bank.changes] == [ExpertKey(3, 7)]


def test_a_base_that_cannot_be_read_changes_no_row_and_is_not_tried_again() -> None:
    bank = Bank(NUM_LAYERS)
    rig, bank.broken = bank.rig(8), {ExpertKey(0, 6)}
    before = list(rows_of(rig))
    for _ in range(3):
        pass_over(rig, 6)
    assert rows_of(rig) == before
    bank.broken.clear()
    for _ in range(3):
        assert pass_over(rig, 6, 7) == [NO_ROW, NO_ROW]
    assert {comes for _, _, comes in bank.changes} == {ExpertKey(0, 7)}


def test_a_dropped_pass_teaches_nothing() -> None:
    bank = Bank(NUM_LAYERS)
    rig = bank.rig(8)
    for _ in range(5):
        rig.residency.begin_pass(PassKind.PLAIN)
        rig.use(0, 6)
        rig.residency.cancel()
    assert bank.changes == []


def test_rows_outlive_a_restart_and_the_bank_agrees() -> None:
    bank = Bank(NUM_LAYERS)
    rig = bank.rig(8)
    while not bank.changes:
        pass_over(rig, 6)
    rig.residency.restart(ResidencyOptions())
    assert pass_over(rig, 6) == [bank.changes[0][0]]


_PASSES = st.lists(
    st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1), max_size=4), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    min_size=3,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(_PASSES, st.integers(1, NUM_LAYERS * NUM_EXPERTS - 1), st.integers(1, 12))
def test_whatever_is_used_every_wave_finds_the_base_that_its_record_needs(
    passes: list[list[set[int]]], num_rows: int, num_slots: int
) -> None:
    bank = Bank(num_rows)
    rig = bank.rig(num_slots)
    holder = {row: record for record, row in enumerate(bank.rows) if row != NO_ROW}
    carried: dict[int, int] = {}
    num_applied = 0
    for used in passes:
        rig.residency.begin_pass(PassKind.DRAFT_VERIFY, num_draft_steps=1)
        rig.predict(*((layer, (expert + 1) % NUM_EXPERTS) for layer, experts in enumerate(used) for expert in experts))
        for layer, experts in enumerate(used):
            for wave in rig.residency.acquire(layer, sorted(experts)):
                rig.residency.pump()
                carried |= {fetch.slot: fetch.num_bytes for fetch in rig.mover.submitted}
                for expert, slot, row in zip(wave.experts, wave.slots, wave.base_rows, strict=True):
                    is_whole = carried[slot] == 100 + expert
                    assert (row == NO_ROW) == is_whole
                    assert is_whole or holder[row] == layer * NUM_EXPERTS + expert
        rig.residency.end_pass(1)
        rig.residency.check()
        for row, leaves, comes in bank.changes[num_applied:]:
            assert holder[row] == leaves.layer * NUM_EXPERTS + leaves.expert
            holder[row] = comes.layer * NUM_EXPERTS + comes.expert
        num_applied = len(bank.changes)
