"""The host arena: exact size, pinned from its start piece by piece, on the memory node asked for if there is one."""

from __future__ import annotations

import mmap

import pytest
import torch

from moespeq.errors import BudgetError
from moespeq.transfer import CudaPinning, PinnedArena
from moespeq.transfer.pages import populate, prefer_node
from transfer_fakes import FakePinning

PAGE = mmap.PAGESIZE


def test_the_arena_is_as_large_as_its_pieces_and_all_of_it_gets_pinned() -> None:
    pinning = FakePinning()
    arena = PinnedArena([3 * PAGE, PAGE], pinning)
    assert arena.num_bytes == len(arena.memory()) == arena.tensor().numel() == 4 * PAGE
    assert not arena.is_pinned(1)
    arena.pin(pytest.fail)
    begin = arena.tensor().data_ptr()
    assert pinning.ranges == {begin: 3 * PAGE, begin + 3 * PAGE: PAGE}
    assert arena.is_pinned(4 * PAGE)
    arena.close()
    arena.close()
    assert not pinning.ranges
    assert not arena.is_pinned(1)


def test_bytes_written_through_the_memory_are_the_tensors() -> None:
    arena = PinnedArena([PAGE], FakePinning())
    arena.memory()[7:10] = b"abc"
    assert arena.tensor()[6:11].tolist() == [0, 97, 98, 99, 0]
    assert arena.tensor().data_ptr() % PAGE == 0


def test_after_a_refusal_nothing_more_is_tried() -> None:
    pinning, warnings = FakePinning(num_allowed=1), list[str]()
    arena = PinnedArena([PAGE, PAGE, PAGE], pinning)
    arena.pin(warnings.append)
    arena.pin(pytest.fail)
    assert arena.pinned_bytes == PAGE
    assert arena.is_pinned(PAGE)
    assert not arena.is_pinned(PAGE + 1)
    assert len(warnings) == 1
    arena.close()


def test_refused_memory_says_how_much_was_asked_for() -> None:
    with pytest.raises(BudgetError, match=r"need 1024\.00 TiB .* the system refused .* --host-memory"):
        PinnedArena([1 << 50], FakePinning())


@pytest.mark.parametrize("node", [0, 63])
def test_an_arena_takes_a_node_that_is_there_and_does_without_one_that_is_not(node: int) -> None:
    arena = PinnedArena([4 * PAGE], FakePinning(), numa_node=node)
    arena.tensor().fill_(3)
    assert int(arena.tensor().sum()) == 3 * 4 * PAGE


def test_a_node_beyond_any_machine_is_not_asked_for() -> None:
    memory = torch.empty(PAGE, dtype=torch.uint8)
    assert not prefer_node(memory.data_ptr(), PAGE, 5000)
    assert not prefer_node(memory.data_ptr(), PAGE, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_buffer_is_pageable_where_nothing_can_be_pinned() -> None:
    assert CudaPinning().buffer(100).shape == (100,)


def test_pages_are_brought_in_without_a_change_to_what_they_hold() -> None:
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[5 * PAGE] = 7
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    populate(address, 64 * PAGE)
    assert memory[5 * PAGE] == 7
    assert sum(memory[:]) == 7
    assert not populate(1 << 46, PAGE), "no memory there"
