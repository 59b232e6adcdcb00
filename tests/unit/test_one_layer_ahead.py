"""The look one layer ahead is the next layer's own router on this layer's input, and disturbs nothing of the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from families import tiny_config
from moespeq.model.experts import IMPLEMENTATION, ExpertsSwitch, register, tag
from moespeq.model.graphs import operators
from moespeq.model.graphs.attention import KVStorage
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.runner import _heard
from moespeq.model.graphs.static_pass import StaticPass
from moespeq.model.one_layer_ahead import OneLayerAhead
from moespeq.model.quantizer import experts_modules

# Families whose router takes hidden states and nothing else, and gives its experts last: a test can ask it itself.
PLAIN_ROUTERS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "phimoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
)
IDS = torch.arange(3, 15)
Experts = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def random_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()


class Heard:
    """What was told, and the inputs of each layer; transformers' own arithmetic as experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = experts_modules(model)
        self.modules = [module for _, module in modules]
        self.blocks = [model.get_submodule(name.rpartition(".")[0]) for name, _ in modules]
        self.told: dict[int, list[list[int]]] = {}
        self.inputs: list[Tensor] = []

    def tell(self, layer: int, routes: Any) -> None:
        assert layer == len(self.inputs) + 1, "told of another layer than the next"
        self.told[layer] = routes

    def experts(self, layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        self.inputs.append(hidden)
        return type(self.modules[layer]).forward.__wrapped__(self.modules[layer], hidden, routes, weights)

    def check(self) -> None:
        """Each layer but the first was told what its router alone makes of the layer before's input."""
        assert sorted(self.told) == list(range(1, len(self.blocks)))
        for layer, routes in self.told.items():
            block = self.blocks[layer]
            router = block.gate if hasattr(block, "gate") else block.router
            with torch.no_grad():
                assert routes == router(self.inputs[layer - 1])[-1].tolist()


@pytest.mark.parametrize("family", PLAIN_ROUTERS)
def test_every_familys_routers_answer_in_a_pass_without_graphs(family: str) -> None:
    model, switch = random_model(family), ExpertsSwitch()
    register()
    model.set_experts_implementation(IMPLEMENTATION)
    tag([module for _, module in experts_modules(model)], switch)
    heard = Heard(model)

    def plain(layer: int, math: Any, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        return heard.experts(layer, hidden, routes, weights)

    ahead = OneLayerAhead(model, switch.using, heard.tell)

    def listening(layer: int, math: Any, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        ahead.hear_input(layer, hidden)
        return plain(layer, math, hidden, routes, weights)

    with torch.no_grad():
        with switch.using(plain):
            expected = model(IDS[None]).logits
        heard.inputs.clear()
        with switch.using(listening):
            assert torch.equal(model(IDS[None]).logits, expected)
    assert switch.active is None
    heard.check()


@pytest.mark.parametrize("family", [family for family in PLAIN_ROUTERS if family != "gpt_oss"])
def test_every_familys_routers_answer_beside_a_graph_runners_prefill(family: str) -> None:
    operators.register()
    model = random_model(family)
    model.set_attn_implementation(operators.NAME)
    model.set_experts_implementation(operators.NAME)
    forward, heard = Forward(model, StaticPass(KVStorage(16)), columns=None), Heard(model)
    places = torch.arange(len(IDS))
    expected = forward(IDS, places, places, 16, heard.experts)
    heard.inputs.clear()
    listening = _heard(heard.experts, OneLayerAhead(model, operators.running, heard.tell))
    assert torch.equal(forward(IDS, places, places, 16, listening), expected)
    heard.check()
