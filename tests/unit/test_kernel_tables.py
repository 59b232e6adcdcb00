"""The tables of the verify kernels: every live pair of a wave's experts once, and nobody else's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from moespeq.kernels.chunk_table import GROUP_PAIRS, ChunkTable
from moespeq.kernels.verify_table import GROUP_INTS, GROUPS_AT, RoutedPairs, VerifyTable

NUM_EXPERTS = 12


def routes(num_rows: int, top_k: int = 3, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(NUM_EXPERTS)[:top_k] for _ in range(num_rows)])


def groups_of(table: VerifyTable | ChunkTable) -> list[tuple[int, int, list[int]]]:
    """(slot, bank row, pairs) of each group, as a kernel reads them."""
    ints = table.device.numpy()
    found = ints[GROUPS_AT : GROUPS_AT + GROUP_INTS * ints[0]].reshape(-1, GROUP_INTS)
    pairs = ints[table.pairs_at :]
    return [(slot, row, pairs[first : first + count].tolist()) for slot, row, first, count in found.tolist()]


def pairs_of(live: np.ndarray, expert: int) -> list[int]:
    return np.flatnonzero(live.reshape(-1) == expert).tolist()


@pytest.mark.parametrize("num_rows", [1, 5, 33])
def test_pairs_of_an_expert_lie_side_by_side_and_ascending(num_rows: int) -> None:
    live = routes(num_rows)
    pairs = RoutedPairs(live)
    assert pairs.experts() == sorted(set(live.reshape(-1).tolist()))
    for expert in range(NUM_EXPERTS):
        first, count = (pairs.first[expert], pairs.count[expert]) if expert < len(pairs.count) else (0, 0)
        assert pairs.order[first : first + count].tolist() == pairs_of(live, expert)


def test_a_wave_holds_its_experts_and_no_others() -> None:
    live = routes(17)
    pairs, table = RoutedPairs(live), VerifyTable(NUM_EXPERTS, 33, 3, "cpu")
    for wave in (pairs.experts(), pairs.experts()[2:4], [pairs.experts()[-1]]):
        table.fill(pairs, wave, [100 + expert for expert in wave], [200 + expert for expert in wave])
        table.upload()
        assert groups_of(table) == [(100 + expert, 200 + expert, pairs_of(live, expert)) for expert in wave]


def test_experts_of_a_wave_come_in_any_order() -> None:
    live = routes(9)
    pairs, table = RoutedPairs(live), VerifyTable(NUM_EXPERTS, 17, 3, "cpu")
    wave = pairs.experts()[::-1]
    table.fill(pairs, wave, range(len(wave)), wave)
    table.upload()
    assert [(row, found) for _, row, found in groups_of(table)] == [(e, pairs_of(live, e)) for e in wave]


@pytest.mark.parametrize("num_rows", [1, 48, 49, 700])
def test_a_chunks_groups_cut_an_experts_pairs_without_losing_one(num_rows: int) -> None:
    live = routes(num_rows)
    pairs, table = RoutedPairs(live), ChunkTable(NUM_EXPERTS, 3 * 700, "cpu", num_waves=4)
    table.begin_layer(pairs)
    wave = pairs.experts()[1:] or pairs.experts()
    table.fill(2, pairs, wave, [100 + expert for expert in wave], [200 + expert for expert in wave])
    found = groups_of(table)
    assert table.max_groups == len(found)
    assert all(0 < len(group) <= GROUP_PAIRS for _, _, group in found)
    for expert in wave:
        mine = [group for slot, row, group in found if (slot, row) == (100 + expert, 200 + expert)]
        assert list(itertools.chain(*mine)) == pairs_of(live, expert)


def test_a_chunks_group_may_hold_all_pairs_of_an_expert() -> None:
    live = routes(700)
    pairs, table = RoutedPairs(live), ChunkTable(NUM_EXPERTS, 3 * 700, "cpu", num_waves=1, group_pairs=None)
    table.begin_layer(pairs)
    wave = pairs.experts()[::-1]
    table.fill(0, pairs, wave, wave, wave)
    assert [(row, found) for _, row, found in groups_of(table)] == [(e, pairs_of(live, e)) for e in wave]
    assert table.counts == [len(pairs_of(live, expert)) for expert in wave]


def test_waves_of_a_layer_share_its_pairs() -> None:
    live = routes(60)
    pairs, table = RoutedPairs(live), ChunkTable(NUM_EXPERTS, 180, "cpu", num_waves=2)
    table.begin_layer(pairs)
    for number, expert in enumerate(pairs.experts()):
        table.fill(number % 2, pairs, [expert], [expert], [expert])
        assert [group for _, _, group in groups_of(table)] == [pairs_of(live, expert)]
