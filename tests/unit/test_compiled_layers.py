"""Layers marked for the compiler: their memory must not wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import make_tiny
from moespeq.model.graphs.compiled import compile_layers, release_layers


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_released_layers_go_with_the_last_reference_to_their_model(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny(family, tmp_path / "checkpoint"), dtype=torch.bfloat16)
    compile_layers(model)
    release_layers(model)
    decoder = model.get_decoder()
    left = [weakref.ref(module) for module in (*decoder.layers, decoder.norm)]
    gc.disable()
    try:
        del model, decoder
        assert not [module for module in left if module() is not None]
    finally:
        gc.enable()
