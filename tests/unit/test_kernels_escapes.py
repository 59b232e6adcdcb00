"""Escapes in the fast decoders: several in a block, in every tile of a row, and rows without any beside them."""

from __future__ import annotations

import pytest

from kernel_cases import in_slot, make_expert, same_bits, trained_like

triton = pytest.importorskip("triton")

from moespeq.kernels.decode import decode_expert  # noqa: E402
from moespeq.kernels.geometry import ExpertGeometry  # noqa: E402
from moespeq.nested import BaseFormat, Layout  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU tests/gpu tests the kernels")
SHAPES = ((3, 1184), (2, 544))
TINY = 1e-30  # too far below any scale for a distance


@pytest.mark.parametrize(
    ("columns", "layout"),
    [
        ([(0, 5), (0, 1029)], Layout.FIXED),  # the same place of two tiles
        ([(0, 5), (0, 1029)], Layout.CODE_WIDTH),
        ([(0, 0), (0, 1), (0, 31), (0, 127), (0, 128), (2, 64)], Layout.FIXED),  # halves of a pair; ends of a block
        ([(1, column) for column in range(1000, 1060)], Layout.FIXED),  # across a tile's end
    ],
    ids=["two tiles", "two tiles", "one block", "many"],
)
def test_every_escape_is_put_in_its_place(columns: list[tuple[int, int]], layout: Layout) -> None:
    matrices = [trained_like(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    for row, column in columns:
        matrices[0][row, column] = TINY
    expert = make_expert(matrices, BaseFormat(4, 32, True), layout)
    decoded = decode_expert(
        in_slot(expert.record), expert.base, geometry=ExpertGeometry(SHAPES, BaseFormat(4, 32, True)), layout=layout
    )
    assert all(same_bits(*pair) for pair in zip(decoded, matrices, strict=True))
