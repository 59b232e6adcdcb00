"""The kernels on a GPU against their torch references, at the sizes of real models."""

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

pytest.importorskip("triton")

from moespeq.kernels.chunk_table import ChunkTable
from moespeq.kernels.decode import decode_expert
from moespeq.kernels.draft import draft_experts
from moespeq.kernels.experts import combine
from moespeq.kernels.geometry import ExpertGeometry
from moespeq.kernels.prefill import prefill_experts
from moespeq.kernels.verify import verify_experts
from moespeq.kernels.verify_table import RoutedPairs
from moespeq.kernels.weighted_sum import weighted_sum
from moespeq.nested import BF16_LAYOUTS, DEFAULT_FORMAT, BaseFormat, Layout, base_record_bytes

pytestmark = pytest.mark.gpu

QWEN = ((2816, 2048), (2048, 1408))
NARROW = ((1536, 2048), (2048, 768))
TINY = ((96, 64), (64, 48))
ODD = ((66, 1100), (1100, 33))
FORMATS = (
    DEFAULT_FORMAT,
    BaseFormat(4, 32, False),
    BaseFormat(3, 64, True),
    BaseFormat(2, 32, False),
    BaseFormat(4, 20, True),
)


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shapes", [QWEN, NARROW, TINY, ODD], ids=str)
def test_decoded_records_are_the_weights_bit_for_bit(shapes: tuple, fmt: BaseFormat, layout: Layout) -> None:
    matrices = [adversarial(*shape, seed=seed, device="cuda") for seed, shape in enumerate(shapes)]
    expert = make_expert(matrices, fmt, layout)
    decoded = decode_expert(in_slot(expert.record), expert.base, geometry=ExpertGeometry(shapes, fmt), layout=layout)
    assert all(same_bits(*pair) for pair in zip(decoded, matrices, strict=True))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("shapes", "rows", "top_k"), [(QWEN, 1, 4), (QWEN, 4, 4), (NARROW, 1, 8), (TINY, 3, 3), (ODD, 2, 2)]
)
def test_draft_is_near_the_float64_product(shapes: tuple, rows: int, top_k: int, fmt: BaseFormat) -> None:
    layer = make_layer(shapes, fmt, Layout.PLAIN, 9, device="cuda")
    hidden = torch.randn(rows, shapes[0][1], device="cuda").to(torch.bfloat16)
    routes = random_routes(rows, top_k, 9, seed=0).cuda()
    weights = torch.rand(rows, top_k, device="cuda")
    found = draft_experts(hidden, routes, weights, layer.bank, first_row=0, geometry=layer.geometry, activation="silu")
    wanted = draft_output(layer, hidden, routes, weights)
    assert (found - wanted).norm() < 0.006 * wanted.norm()  # two roundings to bf16


def verify(layer: Layer, hidden: torch.Tensor, routes: torch.Tensor, *, max_rows: int) -> torch.Tensor:
    products = torch.full((routes.numel(), hidden.shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    inner = torch.full((routes.numel(), layer.geometry.intermediate), torch.nan, dtype=torch.bfloat16, device="cuda")
    verify_experts(
        hidden, layer.table(routes, max_rows), layer.slots, layer.bank, products, inner,
        geometry=layer.geometry, layout=layer.layout, top_k=routes.shape[1], activation="silu",
    )  # fmt: skip
    return products


@pytest.mark.parametrize("fmt", FORMATS[:1] + FORMATS[2:3], ids=str)
@pytest.mark.parametrize("shapes", [QWEN, NARROW, TINY, ODD], ids=str)
def test_nested_and_plain_products_are_equal_bit_for_bit_and_right(shapes: tuple, fmt: BaseFormat) -> None:
    hidden = torch.randn(33, shapes[0][1], device="cuda").to(torch.bfloat16)
    routes = random_routes(33, 4, 6, seed=1)  # about 22 rows an expert: two row tiles
    found = {}
    for layout in BF16_LAYOUTS:
        layer = make_layer(shapes, fmt, layout, 6, device="cuda", base_in_slot=layout is Layout.CODE_WIDTH)
        found[layout] = verify(layer, hidden, routes, max_rows=33)
    wanted = exact_products(layer, hidden, routes)
    assert (found[Layout.PLAIN].float() - wanted).norm() < 0.006 * wanted.norm()
    assert same_bits(found[Layout.FIXED], found[Layout.PLAIN])
    assert same_bits(found[Layout.CODE_WIDTH], found[Layout.PLAIN])


@pytest.mark.parametrize("layout", [Layout.FIXED, Layout.PLAIN])
def test_rows_are_the_same_alone_and_at_any_place_among_others(layout: Layout) -> None:
    layer = make_layer(QWEN, DEFAULT_FORMAT, layout, 5, device="cuda")
    hidden = torch.randn(33, QWEN[0][1], device="cuda").to(torch.bfloat16)
    routes = random_routes(33, 4, 5, seed=2)
    together = verify(layer, hidden, routes, max_rows=33).view(33, 4, -1)
    order = torch.randperm(33)
    moved = verify(layer, hidden[order.cuda()].contiguous(), routes[order], max_rows=33).view(33, 4, -1)
    assert same_bits(moved, together[order.cuda()])
    for row in (0, 7, 32):
        alone = verify(layer, hidden[row : row + 1].contiguous(), routes[row : row + 1], max_rows=33)
        assert same_bits(alone, together[row])


def prefill(
    layer: Layer, hidden: torch.Tensor, routes: torch.Tensor, *, waves: list[list[int]], num_decoded: int = 2
) -> torch.Tensor:
    geometry = layer.geometry
    products = torch.full((routes.numel(), geometry.hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
    inner = torch.full((routes.numel(), geometry.intermediate), torch.nan, dtype=torch.bfloat16, device="cuda")
    scratch = torch.full((num_decoded * geometry.up.rows * geometry.up.cols,), torch.nan, device="cuda").bfloat16()
    pairs, last = RoutedPairs(routes.cpu().numpy()), len(layer.experts) - 1
    table = ChunkTable(len(layer.experts), routes.numel(), "cuda", num_waves=len(waves), group_pairs=None)
    table.begin_layer(pairs)
    for number, wave in enumerate(waves):
        table.fill(number, pairs, wave, [last - expert for expert in wave], layer.bank_rows[wave].tolist())
        prefill_experts(
            hidden, table, layer.slots, layer.bank, products, inner, scratch,
            geometry=geometry, layout=layer.layout, top_k=routes.shape[1], activation="silu",
        )  # fmt: skip
    return products


@pytest.mark.parametrize("fmt", FORMATS[:1] + FORMATS[2:3], ids=str)
@pytest.mark.parametrize("shapes", [QWEN, NARROW, TINY, ODD], ids=str)
def test_a_prompts_products_are_right_and_equal_in_all_layouts(shapes: tuple, fmt: BaseFormat) -> None:
    hidden = torch.randn(300, shapes[0][1], device="cuda").to(torch.bfloat16)
    routes = random_routes(300, 2, 4, seed=1)  # about 150 pairs an expert: a tile and a part of one
    found = {}
    for layout in BF16_LAYOUTS:
        layer = make_layer(shapes, fmt, layout, 4, device="cuda", base_in_slot=layout is Layout.CODE_WIDTH)
        found[layout] = prefill(layer, hidden, routes, waves=[[0, 1, 2, 3]])
    wanted = exact_products(layer, hidden, routes)
    assert (found[Layout.PLAIN].float() - wanted).norm() < 0.006 * wanted.norm()
    assert same_bits(found[Layout.FIXED], found[Layout.PLAIN])
    assert same_bits(found[Layout.CODE_WIDTH], found[Layout.PLAIN])


@pytest.mark.parametrize("layout", [Layout.FIXED, Layout.PLAIN])
def test_a_prompts_pair_has_the_same_bits_alone_at_any_place_and_in_any_wave(layout: Layout) -> None:
    layer = make_layer(QWEN, DEFAULT_FORMAT, layout, 4, device="cuda")
    hidden = torch.randn(700, QWEN[0][1], device="cuda").to(torch.bfloat16)
    routes = random_routes(700, 2, 4, seed=2)
    together = prefill(layer, hidden, routes, waves=[[0, 1, 2, 3]])
    assert same_bits(prefill(layer, hidden, routes, waves=[[3], [1, 0], [2]], num_decoded=1), together)
    order = torch.randperm(700)
    moved = prefill(layer, hidden[order.cuda()].contiguous(), routes[order], waves=[[2, 0, 1, 3]], num_decoded=4)
    assert same_bits(moved.view(700, 2, -1), together.view(700, 2, -1)[order.cuda()])
    for row in (0, 127, 128, 699):
        experts = sorted(routes[row].tolist())
        alone = prefill(layer, hidden[row : row + 1].contiguous(), routes[row : row + 1], waves=[experts])
        assert same_bits(alone, together.view(700, 2, -1)[row])


def test_a_captured_launch_serves_other_routes_and_waves() -> None:
    layer = make_layer(QWEN, DEFAULT_FORMAT, Layout.FIXED, 6, device="cuda")
    hidden = torch.randn(17, QWEN[0][1], device="cuda").to(torch.bfloat16)
    first, second = (random_routes(17, 4, 6, seed=seed) for seed in (3, 4))
    table = layer.table(first, 17)
    products = torch.zeros(17 * 4, QWEN[0][1], dtype=torch.bfloat16, device="cuda")
    inner = torch.zeros(17 * 4, QWEN[1][1], dtype=torch.bfloat16, device="cuda")

    def launch() -> None:
        table.upload()
        verify_experts(
            hidden, table, layer.slots, layer.bank, products, inner,
            geometry=layer.geometry, layout=layer.layout, top_k=4, activation="silu",
        )  # fmt: skip

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for wave in ({0, 2, 4}, {1, 3, 5}):
        slots = layer.table(second, 17, experts=wave)
        table._host.copy_(slots._host)
        graph.replay()
        torch.cuda.synchronize()
    assert same_bits(products, verify(layer, hidden, second, max_rows=17))


def test_a_captured_draft_step_follows_its_routes() -> None:
    layer = make_layer(QWEN, DEFAULT_FORMAT, Layout.PLAIN, 6, device="cuda")
    hidden = torch.randn(1, QWEN[0][1], device="cuda").to(torch.bfloat16)
    routes, weights = random_routes(1, 4, 6, seed=5).cuda(), torch.rand(1, 4, device="cuda")

    def launch() -> torch.Tensor:
        return draft_experts(
            hidden, routes, weights, layer.bank, first_row=0, geometry=layer.geometry, activation="silu"
        )

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    routes.copy_(random_routes(1, 4, 6, seed=6))
    graph.replay()
    assert same_bits(out, launch())


def test_combine_is_the_reference_bit_for_bit() -> None:
    products = torch.randn(33, 4, 2048, device="cuda").to(torch.bfloat16)
    weights = torch.rand(33, 4, device="cuda")
    found, wanted = weighted_sum(products, weights), combine(products, weights, torch.bfloat16)
    assert (found.float() - wanted.float()).abs().max() <= 2**-7 * wanted.float().abs().max()


def test_geometry_agrees_with_the_format() -> None:
    for fmt in FORMATS:
        assert ExpertGeometry(ODD, fmt).base_bytes == base_record_bytes(ODD, fmt)
