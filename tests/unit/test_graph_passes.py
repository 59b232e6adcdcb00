"""The forward that graphs capture, run without capture: it must compute what transformers' own attention computes."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from families import TEXT_FAMILIES, tiny_config
from moespeq.errors import UsageError
from moespeq.model import families
from moespeq.model.graphs import attention, operators, static_pass
from moespeq.model.graphs.attention import KVStorage, attend_plain, attend_side_by_side
from moespeq.model.graphs.compiled import compiled_layers, eager_layers
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.static_pass import StaticPass
from moespeq.model.graphs.suitable import passes_on_cuda, why_not_graphs
from moespeq.model.masks import MaskBuilder
from moespeq.nested import Layout

LENGTH = 64
REASONS = {
    "deepseek_v4": "its experts have a gate of their own",
    "gpt_oss": "its experts have biases",
    "hy_v4": "its experts have a gate of their own",
    "phimoe": "its rotary embedding depends on the positions' values",
}
WITH_GRAPHS = [name for name, family in families.FAMILIES.items() if family.has_graphs]


def random_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()


def own_experts(model: torch.nn.Module):
    """transformers' own arithmetic, layer by layer, as a pass's experts."""
    modules = [module for module in model.modules() if hasattr(module, "_apply_gate")]

    def experts(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        return type(modules[layer]).forward.__wrapped__(modules[layer], hidden, routes, weights)

    return experts


def on_operators(model: torch.nn.Module) -> torch.nn.Module:
    operators.register()
    model.set_attn_implementation(operators.NAME)
    model.set_experts_implementation(operators.NAME)
    return model


@pytest.mark.parametrize("family", WITH_GRAPHS)
def test_chunks_over_static_storage_give_transformers_own_logits(family: str) -> None:
    model, ids = random_model(family), torch.arange(3, 27)
    with torch.no_grad():
        expected = model(ids[None], past_key_values=DynamicCache()).logits[0]
    forward = Forward(on_operators(model), StaticPass(KVStorage(LENGTH)), columns=None)
    found = []
    for begin, end in ((0, 11), (11, 12), (12, 24)):
        places = torch.arange(begin, end)
        found.append(forward(ids[begin:end], places, places, 32, own_experts(model)))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", WITH_GRAPHS)
def test_rows_that_see_all_before_them_need_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = random_model(family), torch.arange(3, 27)
    masked, called = Forward(on_operators(model), StaticPass(KVStorage(LENGTH)), columns=None), []
    unmasked = Forward(model, StaticPass(KVStorage(LENGTH)), columns=None)

    def attend_causal(*args: Any) -> Tensor:
        called.append(True)
        return attention.attend_causal(*args)

    monkeypatch.setattr(static_pass, "_LEAST_CAUSAL_ROWS", 1)
    monkeypatch.setattr(static_pass, "attend_causal", attend_causal)
    for begin, end in ((0, 13), (13, 24)):
        places = torch.arange(begin, end)
        expected = masked(ids[begin:end], places, places, 32, own_experts(model))
        assert not called
        found = unmasked(ids[begin:end], places, places, 32, own_experts(model), end=end)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert called
        called.clear()


def test_a_window_that_hides_earlier_rows_keeps_its_mask() -> None:
    masks = MaskBuilder(tiny_config("mixtral", sliding_window=8), torch.float32, torch.device("cpu"))
    mask = masks.build(torch.arange(12), 16)
    assert list(masks.hide_only_what_follows(mask, 12)) == []
    (kept,) = masks.hide_only_what_follows(mask, 8)
    assert kept is mask


def test_wider_masks_change_nothing() -> None:
    model, ids, places = random_model("mixtral"), torch.arange(3, 15), torch.arange(12)
    wide, narrow = (
        Forward(on_operators(model), StaticPass(KVStorage(LENGTH)), columns=columns) for columns in (LENGTH, None)
    )
    assert torch.equal(
        wide(ids, places, places, 16, own_experts(model)), narrow(ids, places, places, 16, own_experts(model))
    )


def test_a_rewritten_row_forgets_what_was_there() -> None:
    """What makes a rejected draft harmless: the next pass writes the same places again."""
    model, places = random_model("qwen3_moe"), torch.arange(6)
    once = Forward(on_operators(model), StaticPass(KVStorage(LENGTH)), columns=None)
    twice = Forward(model, StaticPass(KVStorage(LENGTH)), columns=None)
    twice(torch.arange(20, 26), places, places, 8, own_experts(model))
    ids = torch.arange(3, 9)
    assert torch.equal(
        twice(ids, places, places, 8, own_experts(model)), once(ids, places, places, 8, own_experts(model))
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_lets_go_of_the_experts_it_was_given(fails: bool) -> None:
    """They hold the runner that holds the forward: an engine's memory must not wait for the garbage collector."""
    model, places = random_model("qwen3_moe"), torch.arange(6)
    forward = Forward(on_operators(model), StaticPass(KVStorage(LENGTH)), columns=None)
    compute = own_experts(model)

    def experts(*args: Any) -> Tensor:
        if fails:
            raise RuntimeError("a record did not arrive")
        return compute(*args)

    left = weakref.ref(experts)
    with suppress(RuntimeError):
        forward(places, places, places, 8, experts)
    del experts
    assert left() is None


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (6, 6), (4, 1)])
def test_heads_side_by_side_attend_as_heads_apart(num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(1)
    query, keys = torch.randn(1, num_heads, 5, 16), torch.randn(1, num_kv_heads, 12, 16)
    values = torch.randn(1, num_kv_heads, 12, 8)
    mask = torch.zeros(1, 1, 5, 12).masked_fill(torch.rand(5, 12) < 0.3, torch.finfo(torch.float32).min)
    apart = attend_plain(query, keys, values, mask, 0.3)
    tall = mask.repeat(1, 1, num_heads // num_kv_heads, 1)
    side_by_side = attend_side_by_side(query, keys, values, tall, 0.3)
    assert apart.shape == (1, 5, num_heads, 8)
    torch.testing.assert_close(side_by_side, apart)


def test_storage_grows_layer_by_layer_and_says_its_size() -> None:
    storage, row = KVStorage(10), torch.ones(1, 2, 1, 4)
    for layer in range(3):
        keys, _ = storage.write(layer, torch.tensor([7]), row, row)
        assert keys[0, :, 7].eq(1).all()
        assert keys.sum() == 8
    assert storage.num_bytes == 3 * 2 * (2 * 10 * 4) * 4


def test_a_bare_forward_says_that_the_experts_are_elsewhere() -> None:
    model = on_operators(random_model("olmoe"))
    with pytest.raises(UsageError, match="call generate"):
        model(torch.tensor([[3, 4]]))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_what_keeps_a_family_from_graphs(family: str) -> None:
    known = families.FAMILIES[family]
    expected = None if known.has_graphs else f"no test on a GPU proves graphs of {family} yet"
    if known.mixer is not None:
        expected = "it has layers with a state, which take one row at a time"
    assert why_not_graphs(random_model(family)) == REASONS.get(family, expected)


def test_a_rotation_that_changes_with_length_keeps_a_model_from_graphs() -> None:
    model = random_model("mixtral")
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert why_not_graphs(model) == "its rotary embedding depends on the positions' values"


def test_an_activation_without_a_kernel_keeps_a_model_from_graphs() -> None:
    model = random_model("mixtral")
    model.config.hidden_act = "tanh"
    assert why_not_graphs(model) == "no kernel computes its activation 'tanh'"


@pytest.mark.parametrize(
    ("family", "passes"), [("qwen3_moe", "CUDA graphs"), ("gpt_oss", "eager: its experts have biases")]
)
def test_people_are_told_how_passes_would_run(family: str, passes: str) -> None:
    assert passes_on_cuda(tiny_config(family), [Layout.FIXED]) == passes


def test_a_cleared_storage_is_as_new() -> None:
    storage, nan = KVStorage(6), torch.full((1, 1, 1, 2), torch.nan)
    keys, values = storage.write(0, torch.tensor([3]), nan, nan)
    storage.clear()
    assert keys.eq(0).all()
    assert values.eq(0).all()


def test_layers_of_two_threads_never_run_in_each_others_way() -> None:
    """Whether layers are compiled is one switch of the process: who captures must not see another one's prefill."""
    inside, others = threading.Event(), []

    def prefill() -> None:
        with eager_layers():
            inside.set()
            others.append("prefill ends")

    with compiled_layers():
        thread = threading.Thread(target=prefill)
        thread.start()
        assert not inside.wait(0.2)
        others.append("capture ends")
    thread.join()
    assert others == ["capture ends", "prefill ends"]
