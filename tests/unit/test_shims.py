"""Shims: in the place of experts that ignore transformers' interface, in an instance of a model, not in its class."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

from families import FAMILIES as TINY
from families import auto_class, make_tiny, tiny_config
from moespeq.errors import CheckpointError, UnsupportedModelError
from moespeq.model import shims
from moespeq.model.checkpoint_map import map_checkpoint
from moespeq.model.empty import empty_model
from moespeq.model.families import FAMILIES
from moespeq.model.quantizer import experts_modules
from moespeq.model.shims.deepseek_v4 import DeepseekV4NormShim
from moespeq.store import open_checkpoint

TINY_OF = {tiny_config(name).get_text_config().model_type: name for name in reversed(TINY)}
SHIMMED = tuple(TINY_OF[family] for family in shims.SHIMS)


def test_the_table_says_which_families_have_a_shim() -> None:
    assert {name for name, family in FAMILIES.items() if family.has_shim} == shims.SHIMS.keys()


@pytest.mark.parametrize("family", ["dbrx", "llama4_text", "step3p7"])
def test_a_shim_gives_the_experts_interface_to_an_instance_and_leaves_the_class_alone(family: str) -> None:
    config = tiny_config(family)
    assert len(experts_modules(empty_model(config))) == 3
    assert not experts_modules(auto_class(config).from_config(config))


@pytest.mark.parametrize("family", SHIMMED)
def test_a_shim_has_the_weights_of_what_it_stands_for_and_the_rest_keeps_its_names(family: str) -> None:
    config = tiny_config(family)
    own, ours = auto_class(config).from_config(config), empty_model(config)
    assert sum(map(torch.numel, ours.parameters())) == sum(map(torch.numel, own.parameters()))
    dense = {name for name, _ in own.named_parameters() if ".experts." not in name}
    assert dense == {name for name, _ in ours.named_parameters() if ".experts." not in name}


@pytest.mark.parametrize("family", SHIMMED)
def test_installing_again_changes_nothing(family: str) -> None:
    model = empty_model(tiny_config(family))
    before = [module for _, module in experts_modules(model)]
    shims.install(model)
    assert [module for _, module in experts_modules(model)] == before


def test_a_family_with_the_interface_needs_no_shim() -> None:
    model = empty_model(tiny_config("mixtral"))
    before = copy.copy(dict(model.named_modules()))
    shims.install(model)
    assert dict(model.named_modules()) == before
    assert shims.converters_of(model) == []


def test_a_norm_of_deepseek_v4_answers_in_the_dtype_it_is_asked_in_and_else_as_its_own() -> None:
    own = DeepseekV4RMSNorm(16)
    own.weight.data = torch.rand(16, generator=torch.Generator().manual_seed(0))
    ours, rows = DeepseekV4NormShim(own), torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours(rows), own(rows))
    assert torch.equal(ours(rows.bfloat16()), own(rows.bfloat16()).bfloat16())


def test_llama4_with_several_experts_a_token_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gives a token 2 experts, and only checkpoints with one"):
        empty_model(tiny_config("llama4_text", num_experts_per_tok=2))


@pytest.mark.parametrize("num_rows", [8 * 48 + 1, 8 * 40])
def test_stacked_rows_that_are_not_those_of_every_expert_fit_none(tmp_path: Path, num_rows: int) -> None:
    folder = make_tiny("dbrx", tmp_path / "m", shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.blocks.1.ffn.experts.mlp.w2"] = torch.zeros(num_rows, 64, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="fits no expert"):
        map_checkpoint(open_checkpoint(folder))
