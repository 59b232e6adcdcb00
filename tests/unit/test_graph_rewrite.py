"""Rewritten layers compute what the layers compute, and patterns that only look alike stay as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from transformers import AutoModelForCausalLM

from families import tiny_config
from moespeq.model import families
from moespeq.model.graphs import operators, small_ops
from moespeq.model.graphs.attention import KVStorage
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.rewrite import Rewritten, rewrite
from moespeq.model.graphs.static_pass import StaticPass

WITH_GRAPHS = [name for name, family in families.FAMILIES.items() if family.has_graphs]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    small_ops.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Rewriting:
    """A backend that rewrites and runs the graph as it is; keeps what was counted and called."""

    def __init__(self) -> None:
        self.counts: list[Rewritten] = []
        self.called: list[list[Any]] = []

    def __call__(self, module: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.counts.append(rewrite(module.graph))
        module.recompile()
        self.called.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    def num_calls(self, target: object) -> int:
        return sum(called.count(target) for called in self.called)


def model_on_operators(family: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    operators.register()
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype).eval().requires_grad_(False)
    model.set_attn_implementation(operators.NAME)
    model.set_experts_implementation(operators.NAME)
    return model


def logits_and_routing(model: torch.nn.Module, num_rows: int) -> tuple[Tensor, list[Tensor]]:
    forward, routing, rows = Forward(model, StaticPass(KVStorage(64)), columns=64), [], torch.arange(num_rows)

    def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        order = routes.argsort(dim=-1)
        routing.extend((routes.gather(-1, order), weights.gather(-1, order)))
        return hidden * 0.5

    return forward(rows + 3, rows, rows, 64, experts), routing


def rewritten(model: torch.nn.Module, num_rows: int) -> tuple[Rewriting, Tensor, list[Tensor]]:
    backend = Rewriting()
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    return backend, *logits_and_routing(model, num_rows)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("family", WITH_GRAPHS)
def test_rewritten_layers_route_and_compute_as_written(family: str, num_rows: int) -> None:
    model = model_on_operators(family, torch.float32)
    expected, expected_routing = logits_and_routing(model, num_rows)
    backend, found, routing = rewritten(model, num_rows)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for one, other in zip(routing, expected_routing, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert backend.num_calls(torch._C._nn.linear) == 0 or num_rows > 1


def test_one_row_of_qwen2_moe_is_rewritten_whole() -> None:
    backend, *_ = rewritten(model_on_operators("qwen2_moe", torch.bfloat16), 1)
    ops = torch.ops.moespeq
    assert backend.counts == [Rewritten(norms=2, linears=9, single_outputs=0, topk=1)]
    assert [backend.num_calls(op.default) for op in (ops.rms_norm, ops.add_rms_norm, ops.softmax_topk)] == [1, 1, 1]
    assert backend.num_calls(ops.linears.default) == 4  # qkv; o; gate with up, router, shared gate; down
    assert not any(backend.num_calls(each) for each in (torch.topk, F.silu, torch._C._nn.linear))


def test_several_rows_keep_their_products_but_for_single_outputs() -> None:
    backend, *_ = rewritten(model_on_operators("qwen2_moe", torch.bfloat16), 3)
    assert backend.counts == [Rewritten(norms=0, linears=0, single_outputs=1, topk=1)]
    assert backend.num_calls(torch.ops.moespeq.linears.default) == 0
    assert backend.num_calls(torch._C._nn.linear) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mla_router_in_float32_reads_its_16_bit_weights_directly(dtype: torch.dtype) -> None:
    backend, *_ = rewritten(model_on_operators("deepseek_v3", dtype), 1)
    assert backend.num_calls(torch._C._nn.linear) == 0


def check(function: Callable[..., Any], *inputs: Tensor) -> Rewriting:
    """Rewrite `function` and compare its results."""
    backend = Rewriting()
    expected = function(*(each.clone() for each in inputs))
    found = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*(e.clone() for e in inputs))
    torch.testing.assert_close(found, expected)
    return backend


def test_maps_of_a_row_that_is_written_in_place_stay_apart() -> None:
    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = x * 2
        left = F.linear(y, first)
        y += 1
        return left + F.linear(y, second)

    backend = check(function, torch.randn(1, 8), torch.randn(4, 8), torch.randn(4, 8))
    assert backend.counts[0].linears == 0


@pytest.mark.parametrize("read", ["gate", "up"])
def test_a_gated_pair_of_which_something_else_reads_a_half_keeps_its_activation(read: str) -> None:
    def function(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        halves = {"gate": F.linear(x, gate), "up": F.linear(x, up)}
        return F.silu(halves["gate"]) * halves["up"], halves[read]

    backend = check(function, torch.randn(1, 8), torch.randn(4, 8), torch.randn(4, 8))
    assert backend.counts[0].linears == 2
    assert operator.mul in backend.called[0]


def test_weights_that_the_graph_computes_are_left_alone() -> None:
    backend = check(lambda x, weight: F.linear(x, weight * 2), torch.randn(1, 8), torch.randn(4, 8))
    assert backend.counts[0].linears == 0


def test_a_softmax_that_something_else_reads_stays() -> None:
    def function(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = logits.softmax(-1)
        return *scores.topk(2), scores

    backend = check(function, torch.randn(3, 8))
    assert backend.num_calls(torch.ops.moespeq.topk.default) == 1


def test_values_that_are_read_before_their_normalization_stay_as_they_were() -> None:
    def function(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = torch.topk(logits.softmax(-1), 2)
        largest = values.max() + 0
        values = values / values.sum(dim=-1, keepdim=True)
        return values, indices, largest

    assert check(function, torch.randn(3, 8)).num_calls(torch.ops.moespeq.softmax_topk.default) == 1


@pytest.mark.parametrize("options", [{"dim": 0}, {"largest": False}, {"k": 33}])
def test_other_topk_stays(options: dict[str, Any]) -> None:
    backend = check(lambda x: tuple(torch.topk(x, **{"k": 2, **options})), torch.randn(40, 40))
    assert backend.counts[0].topk == 0


@pytest.mark.parametrize("power", [2, 3])
def test_only_the_root_mean_square_is_taken_for_a_norm(power: int) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return weight * (wide * torch.rsqrt(wide.pow(power).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    assert check(function, torch.rand(1, 8), torch.randn(8)).counts[0].norms == (power == 2)
