"""The kernels of prompts with many pairs an expert, in Triton's interpreter: decoding in batches, and large tiles."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import Layer, adversarial, exact_products, in_slot, make_expert, make_layer, same_bits

triton = pytest.importorskip("triton")

from moespeq.kernels.chunk_table import ChunkTable  # noqa: E402
from moespeq.kernels.decode import decode_groups  # noqa: E402
from moespeq.kernels.geometry import ExpertGeometry  # noqa: E402
from moespeq.kernels.prefill import prefill_experts  # noqa: E402
from moespeq.kernels.verify_table import BASE_IN_SLOT, RoutedPairs  # noqa: E402
from moespeq.nested import BF16_LAYOUTS, BaseFormat, Layout  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU tests/gpu tests the kernels")
FORMAT = BaseFormat(4, 64, True)
GATED, UNGATED = ((32, 24), (24, 16)), ((20, 24), (24, 20))  # columns that are no whole blocks, rows no whole tiles
PAIRS = [0] * 129 + [1] + [2] * 20  # a tile and one pair more, a single pair, less than a tile


def table_of(experts: list[int], wave: list[int], bank_rows: list[int], slots: list[int]) -> ChunkTable:
    """The table of a wave where row t is routed to experts[t] alone."""
    pairs = RoutedPairs(torch.tensor(experts)[:, None].numpy())
    table = ChunkTable(3, len(experts), "cpu", num_waves=1, group_pairs=None)
    table.begin_layer(pairs)
    table.fill(0, pairs, wave, slots, bank_rows)
    return table


def products(
    layer: Layer,
    hidden: torch.Tensor,
    experts: list[int],
    *,
    waves: tuple[list[int], ...] = ([0, 1, 2],),
    activation: str = "silu",
    num_decoded: int = 3,
) -> torch.Tensor:
    """[T, H] of one expert a row; what no wave has stays 7."""
    geometry = layer.geometry
    out = torch.full((len(experts), geometry.hidden), 7.0, dtype=torch.bfloat16)
    inner = torch.full((len(experts), geometry.intermediate), torch.nan, dtype=torch.bfloat16)
    scratch = torch.full((num_decoded * geometry.up.rows * geometry.up.cols,), torch.nan, dtype=torch.bfloat16)
    for wave in waves:
        table = table_of(experts, wave, layer.bank_rows[wave].tolist(), [2 - expert for expert in wave])
        prefill_experts(
            hidden, table, layer.slots, layer.bank, out, inner, scratch,
            geometry=geometry, layout=layer.layout, top_k=1, activation=activation,
        )  # fmt: skip
    return out


def rows(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.parametrize("layout", [Layout.FIXED, Layout.CODE_WIDTH])
@pytest.mark.parametrize("base_in_slot", [False, True], ids=["base in bank", "base in slot"])
def test_a_batch_of_records_is_decoded_bit_for_bit(layout: Layout, base_in_slot: bool) -> None:
    shapes, fmt = ((20, 64), (33, 10)), BaseFormat(4, 20, True)
    experts = [
        make_expert([adversarial(*shape, seed=2 * e + i) for i, shape in enumerate(shapes)], fmt, layout)
        for e in range(3)
    ]
    geometry = ExpertGeometry(shapes, fmt)
    records = [in_slot(torch.cat((e.base, e.record)) if base_in_slot else e.record) for e in experts]
    stride = -(-max(record.numel() for record in records) // 16) * 16
    slots = torch.stack([torch.nn.functional.pad(record, (0, stride - record.numel())) for record in records])
    bank = torch.stack([expert.base for expert in experts[::-1]])
    table = table_of([0, 1, 2], [2, 0, 1], [BASE_IN_SLOT] * 3 if base_in_slot else [0, 2, 1], [2, 0, 1])
    for number, m in enumerate((geometry.up, geometry.down)):
        out = torch.zeros(2, m.rows, m.cols, dtype=torch.bfloat16)
        decode_groups(table, range(1, 3), slots, bank, out, geometry=geometry, m=m, layout=layout)
        assert all(same_bits(out[place], experts[place].matrices[number]) for place in range(2))


@pytest.mark.parametrize(("shapes", "activation"), [(GATED, "silu"), (UNGATED, "relu2")], ids=["gated", "ungated"])
def test_products_are_near_the_exact_ones_and_equal_in_all_layouts(shapes: tuple, activation: str) -> None:
    hidden, found = rows(len(PAIRS), shapes[0][1]), {}
    for layout in BF16_LAYOUTS:
        layer = make_layer(shapes, FORMAT, layout, 3, base_in_slot=layout is Layout.CODE_WIDTH)
        found[layout] = products(layer, hidden, PAIRS, activation=activation)
    if shapes is GATED:
        wanted = exact_products(layer, hidden, torch.tensor(PAIRS)[:, None])
    else:
        up, down = zip(*(layer.experts[expert].matrices for expert in PAIRS), strict=True)
        inner = torch.einsum("pih,ph->pi", torch.stack(up).float(), hidden.float()).relu().square()
        wanted = torch.einsum("phi,pi->ph", torch.stack(down).float(), inner.to(torch.bfloat16).float())
    assert (found[Layout.PLAIN].float() - wanted).norm() < 0.03 * wanted.norm()
    assert same_bits(found[Layout.FIXED], found[Layout.PLAIN])
    assert same_bits(found[Layout.CODE_WIDTH], found[Layout.PLAIN])


def test_waves_and_scratch_change_no_bit_and_leave_other_experts_alone() -> None:
    layer, hidden = make_layer(GATED, FORMAT, Layout.FIXED, 3), rows(len(PAIRS), GATED[0][1])
    whole = products(layer, hidden, PAIRS)
    assert same_bits(products(layer, hidden, PAIRS, num_decoded=2), whole)
    assert same_bits(products(layer, hidden, PAIRS, waves=([2], [1, 0]), num_decoded=1), whole)
    part = products(layer, hidden, PAIRS, waves=([2],))
    assert same_bits(part[130:], whole[130:])
    assert (part[:130] == 7.0).all()


def test_a_pairs_bits_depend_on_no_other_pair_and_not_on_its_place() -> None:
    layer, hidden = make_layer(GATED, FORMAT, Layout.PLAIN, 3), rows(140, GATED[0][1])
    whole = products(layer, hidden, [0] * 140, waves=([0],))
    order = torch.randperm(140, generator=torch.Generator().manual_seed(1))
    assert same_bits(products(layer, hidden[order], [0] * 140, waves=([0],)), whole[order])
    for row in (0, 127, 139):
        assert same_bits(products(layer, hidden[row : row + 1], [0], waves=([0],)), whole[row : row + 1])
