"""The bank of some experts' bases: what the draft reads, and how a row goes from one expert to another."""

from __future__ import annotations

import torch

from kernel_cases import Expert, make_expert, trained_like
from moespeq.decode.base_bank import lend_base
from moespeq.kernels import ExpertMath
from moespeq.model.experts import DraftExperts
from moespeq.model.weights import BaseBank, ExpertWeights
from moespeq.nested import DEFAULT_FORMAT, Layout, dequantize_base
from moespeq.residency import NO_ROW
from moespeq.types import ExpertKey
from transfer_fakes import FakeDisk, host_records

SHAPES = ((8, 64), (64, 4))  # H = 64, I = 4
NUM_EXPERTS = 3
SILU = ExpertMath(
    activate=lambda inner: torch.nn.functional.silu(inner[:, :4]) * inner[:, 4:], up_bias=None, down_bias=None
)


class Bases:
    """A store of base records of 8 bytes, each 100 + its expert."""

    def base_bytes(self, key: ExpertKey) -> int:
        return 8

    def read_base_into(self, key: ExpertKey, buffer: memoryview, *, verify: bool = False) -> None:
        assert verify
        buffer[:8] = bytes([100 + key.expert] * 8)


def experts() -> list[Expert]:
    """Two layers of three."""
    return [
        make_expert([trained_like(*shape, seed=2 * n + m) for m, shape in enumerate(SHAPES)], DEFAULT_FORMAT, layout)
        for n, layout in enumerate([Layout.FIXED] * 2 * NUM_EXPERTS)
    ]


def bank_of(made: list[Expert]) -> BaseBank:
    """Rows for expert 1 of layer 0 and for expert 2 of layer 1."""
    rows = [NO_ROW, 0, NO_ROW, NO_ROW, NO_ROW, 1]
    records = torch.stack([made[1].base, made[5].base])
    row_map = torch.tensor(rows, dtype=torch.int32).view(2, NUM_EXPERTS)
    return BaseBank(records, rows, NUM_EXPERTS, SHAPES, DEFAULT_FORMAT, row_map=row_map)


def weights_of(bank: BaseBank | None, slots: torch.Tensor | None = None) -> ExpertWeights:
    slots = torch.zeros(1, 1, dtype=torch.uint8) if slots is None else slots
    return ExpertWeights(slots, [Layout.FIXED] * 2, SHAPES, DEFAULT_FORMAT, bank)


def test_a_base_is_lent_out_of_its_record_in_host_memory_and_given_back() -> None:
    disk = FakeDisk(record_bytes=4096)
    records = host_records(disk, NUM_EXPERTS, num_places=2)
    for expert in (0, 1, 2, 0):  # a lease that stayed would leave no place
        with lend_base(Bases(), records, lambda key: 24, ExpertKey(0, expert)) as base:
            assert base.tolist() == [expert] * 24
    records.close()


def test_a_record_without_a_base_in_front_has_its_base_read_from_the_store() -> None:
    records = host_records(FakeDisk(), NUM_EXPERTS)
    with lend_base(Bases(), records, lambda key: 0, ExpertKey(0, 2)) as base:
        assert base.tolist() == [102] * 8
    assert records.counters().disk_reads == 0
    records.close()


def test_a_row_that_changes_hands_serves_the_new_expert_and_not_the_old_one() -> None:
    made = experts()
    bank = bank_of(made)
    weights = weights_of(bank)
    bank.replace(0, ExpertKey(0, 1), ExpertKey(1, 0), made[3].base)
    has_base = [weights.has_base(layer, expert) for layer in range(2) for expert in range(NUM_EXPERTS)]
    assert has_base == [False, False, False, True, False, True]
    assert bank.row_map is not None
    assert bank.row_map.tolist() == [[NO_ROW] * 3, [0, NO_ROW, 1]]
    for found, base, shape in zip(weights.base(1, 0, torch.bfloat16), made[3].bases, SHAPES, strict=True):
        assert torch.equal(found, dequantize_base(base, shape, DEFAULT_FORMAT, torch.bfloat16))


def test_an_expert_without_a_base_drafts_as_zero_and_the_others_weights_stay() -> None:
    draft = DraftExperts(weights_of(bank_of(experts())))
    hidden = trained_like(1, 64, seed=50)

    def drafted(routes: list[int], weights: list[float]) -> torch.Tensor:
        return draft(0, SILU, hidden, torch.tensor([routes]), torch.tensor([weights]))

    alone = drafted([1], [0.25])
    assert alone.any()
    assert torch.equal(drafted([0, 1], [0.75, 0.25]), alone)
    assert not drafted([0, 2], [0.5, 0.5]).any()
    assert draft.take_routes() == [[1], [0, 1], [0, 2]]


def test_a_record_is_exact_from_a_row_of_the_bank_and_with_its_base_in_front() -> None:
    made = experts()
    longest = max(len(expert.base) + len(expert.record) for expert in made)
    slots = torch.zeros(2, longest, dtype=torch.uint8)
    slots[0, : len(made[5].record)] = made[5].record
    slots[1, : len(made[4].base) + len(made[4].record)] = torch.cat([made[4].base, made[4].record])
    weights = weights_of(bank_of(made), slots)
    for slot, row, expert in ((0, 1, made[5]), (1, NO_ROW, made[4])):
        for found, wanted in zip(weights.exact(1, slot, row, torch.bfloat16), expert.matrices, strict=True):
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
