"""The Triton kernels in Triton's interpreter, at small sizes, against their torch references."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import (
    Layer,
    adversarial,
    draft_output,
    exact_products,
    in_slot,
    make_expert,
    make_layer,
    random_routes,
    same_bits,
)

triton = pytest.importorskip("triton")

from moespeq.kernels.decode import decode_expert  # noqa: E402
from moespeq.kernels.draft import draft_down, draft_experts  # noqa: E402
from moespeq.kernels.geometry import ExpertGeometry  # noqa: E402
from moespeq.kernels.verify import verify_experts  # noqa: E402
from moespeq.kernels.verify_table import RoutedPairs, VerifyTable  # noqa: E402
from moespeq.nested import BF16_LAYOUTS, BaseFormat, Layout, base_record_bytes  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU tests/gpu tests the kernels")
NESTED = (Layout.FIXED, Layout.CODE_WIDTH)


@pytest.mark.parametrize("layout", NESTED)
@pytest.mark.parametrize(
    ("shapes", "fmt"),
    [
        (((3, 1056), (2, 544)), BaseFormat(4, 32, True)),  # units; two tiles a row, and a row a tile
        (((2, 544), (4, 8)), BaseFormat(3, 64, False)),
        (((2, 544), (4, 8)), BaseFormat(2, 64, True)),
        (((20, 64), (64, 10)), BaseFormat(4, 20, True)),  # elements: several rows a tile, short groups
        (((10, 333), (333, 5)), BaseFormat(3, 7, False)),
    ],
    ids=str,
)
def test_decoded_records_are_the_weights_bit_for_bit(shapes: tuple, fmt: BaseFormat, layout: Layout) -> None:
    matrices = [adversarial(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    expert = make_expert(matrices, fmt, layout)
    decoded = decode_expert(in_slot(expert.record), expert.base, geometry=ExpertGeometry(shapes, fmt), layout=layout)
    assert all(same_bits(*pair) for pair in zip(decoded, matrices, strict=True))


@pytest.mark.parametrize("fmt", [BaseFormat(4, 32, True), BaseFormat(3, 32, False), BaseFormat(4, 20, True)], ids=str)
def test_draft_is_near_the_float64_product(fmt: BaseFormat) -> None:
    layer = make_layer(((64, 96), (96, 32)), fmt, Layout.PLAIN, 4)
    hidden = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    routes, weights = random_routes(2, 3, 4, seed=0), torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    found = draft_experts(hidden, routes, weights, layer.bank, first_row=0, geometry=layer.geometry, activation="silu")
    wanted = draft_output(layer, hidden, routes, weights)
    assert (found - wanted).norm() < 0.03 * wanted.norm()  # the interpreter cuts bf16 off instead of rounding


def test_an_unknown_expert_adds_nothing_to_the_draft() -> None:
    layer = make_layer(((64, 96), (96, 32)), BaseFormat(4, 32, True), Layout.PLAIN, 3)
    hidden = torch.ones(1, 96, dtype=torch.bfloat16)

    def draft(routes: list[int], weights: list[float]) -> torch.Tensor:
        arguments = (hidden, torch.tensor([routes]), torch.tensor([weights]), layer.bank)
        return draft_experts(*arguments, first_row=0, geometry=layer.geometry, activation="gelu")

    assert torch.equal(draft([1, -1], [0.5, 0.5]), draft([1, 2], [0.5, 0.0]))


@pytest.mark.parametrize("shapes", [((64, 96), (96, 32)), ((20, 50), (50, 10))], ids=str)
def test_a_bank_of_some_experts_in_any_order_drafts_as_the_whole_one_without_the_others(shapes: tuple) -> None:
    fmt = BaseFormat(4, 32, True)
    layer = make_layer(shapes, fmt, Layout.PLAIN, 5)
    hidden = torch.randn(2, shapes[0][1], generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    routes, weights = torch.tensor([[0, 3, 4], [1, 2, 0]]), torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    bank, rows = layer.bank[[4, 0, 2]], torch.tensor([1, -1, 2, -1, 0], dtype=torch.int32)
    activation = "silu" if layer.geometry.is_gated else "gelu"

    def draft(routes: torch.Tensor, bank: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        arguments = (hidden, routes, weights, bank)
        return draft_experts(*arguments, first_row=0, rows=rows, geometry=layer.geometry, activation=activation)

    missing = torch.where((routes == 1) | (routes == 3), -1, routes)
    assert torch.equal(draft(routes, bank, rows), draft(missing, layer.bank, None))


def test_draft_reads_no_rows_but_those_of_its_experts() -> None:
    layer = make_layer(((64, 96), (96, 32)), BaseFormat(4, 32, True), Layout.PLAIN, 3)
    rows = torch.full((4, 32), torch.nan, dtype=torch.bfloat16)
    rows[:2] = 1.0
    routes, weights = torch.tensor([[0, 2, -1]]), torch.full((1, 3), 0.5)  # three of a program's four slots
    out = draft_down(rows[:3], routes, weights, layer.bank, first_row=0, geometry=layer.geometry)
    assert out.isfinite().all()
    assert out.any()


def test_experts_with_their_base_in_the_slot_and_in_any_row_of_the_bank_share_a_wave() -> None:
    shapes, fmt, rows = ((96, 64), (64, 48)), BaseFormat(4, 64, True), 4
    hidden = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    routes = torch.tensor([[0], [1], [1], [2]])
    banked, whole = (make_layer(shapes, fmt, Layout.FIXED, 3, base_in_slot=base_in_slot) for base_in_slot in (0, 1))
    slots = whole.slots.clone()
    slots[2, : banked.slots.shape[1]] = banked.slots[2]  # expert 0 without its base
    slots[0, : banked.slots.shape[1]] = banked.slots[0]  # expert 2
    table = VerifyTable(3, rows, 1, "cpu")
    table.fill(RoutedPairs(routes.numpy()), [0, 1, 2], [2, 1, 0], [1, -1, 0])
    table.upload()

    def products(layer: Layer, table: VerifyTable, slots: torch.Tensor, bank: torch.Tensor) -> torch.Tensor:
        out, inner = torch.zeros(rows, 64, dtype=torch.bfloat16), torch.zeros(rows, 48, dtype=torch.bfloat16)
        how = {"geometry": layer.geometry, "layout": Layout.FIXED, "top_k": 1, "activation": "silu"}
        verify_experts(hidden, table, slots, bank, out, inner, **how)
        return out

    found = products(whole, table, slots, banked.bank[[2, 0]])
    assert same_bits(found, products(banked, banked.table(routes, rows), banked.slots, banked.bank))


@pytest.mark.parametrize("shapes", [((20, 544), (544, 10)), ((96, 64), (64, 48))], ids=str)
def test_nested_and_plain_products_are_equal_bit_for_bit_whatever_shares_the_batch(shapes: tuple) -> None:
    fmt, rows = BaseFormat(4, 64, True), 18
    hidden = torch.randn(rows, shapes[0][1], generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    routes = torch.zeros(rows, 1, dtype=torch.int64)  # one expert on two row tiles, and one left to another wave
    routes[-1] = 1
    found = {}
    for layout in BF16_LAYOUTS:
        layer = make_layer(shapes, fmt, layout, 2, base_in_slot=layout is Layout.FIXED)
        products = torch.full((rows, shapes[0][1]), 7.0, dtype=torch.bfloat16)
        inner = torch.zeros(rows, shapes[1][1], dtype=torch.bfloat16)
        table = layer.table(routes, rows, experts={0})
        verify_experts(
            hidden, table, layer.slots, layer.bank, products, inner,
            geometry=layer.geometry, layout=layout, top_k=1, activation="silu",
        )  # fmt: skip
        found[layout] = products
    wanted = exact_products(layer, hidden, routes)[:-1]
    assert (found[Layout.PLAIN][:-1].float() - wanted).norm() < 0.03 * wanted.norm()
    assert (found[Layout.PLAIN][-1] == 7.0).all()
    assert all(same_bits(found[layout], found[Layout.PLAIN]) for layout in NESTED)


def test_geometry_agrees_with_the_format() -> None:
    for fmt in (BaseFormat(4, 64, True), BaseFormat(3, 20, False), BaseFormat(2, 7, True)):
        shapes = ((66, 1100), (1100, 33))
        assert ExpertGeometry(shapes, fmt).base_bytes == base_record_bytes(shapes, fmt)
