"""Every layer gets the mask transformers would make for it, whatever form the model's forward takes masks in."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from families import TEXT_FAMILIES, tiny_config
from family_configs import SPECIFIC
from moespeq.model.caches import new_cache
from moespeq.model.masks import MaskBuilder
from moespeq.model.recurrent import RecurrentStates

CPU = torch.device("cpu")
LENGTH, BUCKET, WINDOW = 24, 32, 6
WINDOWED: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "qwen2_moe": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {"sliding_window": WINDOW, "use_sliding_window": True},
    "gpt_oss": {"sliding_window": WINDOW},
}
CASES = [pytest.param(family, {}, id=family) for family in TEXT_FAMILIES] + [
    pytest.param(family, overrides, id=f"{family}-window") for family, overrides in WINDOWED.items()
]


def model_of(family: str, overrides: dict[str, Any]) -> PreTrainedModel:
    config = tiny_config(family, **overrides, attn_implementation="eager")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@contextmanager
def masks_of_layers(model: PreTrainedModel) -> Iterator[list[torch.Tensor | None]]:
    """Collects, layer by layer, which positions a pass may see: bool [T, B], None for a layer with a state."""
    seen: list[torch.Tensor | None] = []

    def keep(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs["attention_mask"]
        mask = mask["causal"] if isinstance(mask, dict) else mask  # beside one for padding
        seen.append(mask if mask is None else mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0)

    layers = model.transformer.blocks if hasattr(model, "transformer") else model.model.layers
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def own_masks(model: PreTrainedModel, chunks: Sequence[int]) -> list[torch.Tensor | None]:
    """What each layer may see in the last of some passes, by transformers itself."""
    kind = getattr(sys.modules[type(model).__module__], "MiniMaxCache", None)
    cache, start = kind() if kind else DynamicCache(config=model.config), 0
    for length in chunks:
        with masks_of_layers(model) as seen, torch.inference_mode():
            model(torch.full((1, length), 5), past_key_values=cache)
        start += length
    return seen


def our_masks(model: PreTrainedModel, start: int, places: torch.Tensor) -> list[torch.Tensor | None]:
    """What each layer may see in a pass of ours whose rows stand at `places`, written from `start`."""
    states = RecurrentStates(rows=LENGTH)
    cache = new_cache(model, 2 * BUCKET, CPU, states)
    states.begin_target(0, len(places), by_row=False)  # what states hold is not looked at here
    cache.cursor.move(start, len(places), BUCKET)
    mask = MaskBuilder(model.config, torch.float32, CPU).build(places, BUCKET)
    with masks_of_layers(model) as seen, torch.inference_mode():
        model(
            torch.full((1, len(places)), 5),
            position_ids=places[None],
            attention_mask=mask,
            past_key_values=cache,
        )
    return seen


def as_ours(mask: torch.Tensor, length: int) -> torch.Tensor:
    """A sliding cache of transformers drops old positions; they are hidden ones of ours."""
    mask = torch.nn.functional.pad(mask, (length - mask.shape[1], 0))
    return torch.nn.functional.pad(mask, (0, BUCKET - length))


def assert_same(ours: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    for own, mask in zip(expected, ours, strict=True):
        assert (own is None) == (mask is None)
        if own is not None and mask is not None:
            assert torch.equal(mask, as_ours(own, LENGTH))


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_a_prefill_sees_what_transformers_lets_it_see(family: str, overrides: dict[str, Any]) -> None:
    model = model_of(family, overrides)
    expected, ours = own_masks(model, [LENGTH]), our_masks(model, 0, torch.arange(LENGTH))
    assert len(ours) == len(expected) == model.config.num_hidden_layers
    assert_same(ours, expected)
    is_windowed = any(mask is not None and not mask[-1, 0] for mask in ours)
    reaches = {"sliding_window", "attention_chunk_size"} & SPECIFIC[family].keys()
    assert is_windowed == (bool(overrides) or bool(reaches))


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_later_rows_see_what_transformers_lets_them_see(family: str, overrides: dict[str, Any]) -> None:
    model = model_of(family, overrides)
    expected = own_masks(model, [LENGTH - 4, 4])
    ours = our_masks(model, LENGTH - 4, torch.arange(LENGTH - 4, LENGTH))
    assert_same(ours, expected)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_padded_row_sees_what_the_last_live_row_sees(window: int | None) -> None:
    builder = MaskBuilder(tiny_config("mixtral", sliding_window=window), torch.float32, CPU)
    mask = builder.build(torch.tensor([10, 11, 12, 12, 12]), BUCKET)
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(mask[0, 0, 2:], mask[0, 0, 2].expand(3, -1))


def test_hidden_positions_have_no_weight_and_no_infinity() -> None:
    """-inf times the zero of a position never written would be no number."""
    mask = MaskBuilder(tiny_config("olmoe"), torch.bfloat16, CPU).build(torch.tensor([3]), BUCKET)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (1, 1, 1, BUCKET)
    assert mask.isfinite().all()
    assert torch.equal(mask[0, 0, 0, :4], torch.zeros(4, dtype=torch.bfloat16))
    assert mask[0, 0].float().softmax(-1)[0, 4:].sum() == 0


def test_one_builder_serves_every_bucket() -> None:
    builder = MaskBuilder(tiny_config("olmoe"), torch.float32, CPU)
    for bucket in (BUCKET, 2 * BUCKET, BUCKET):
        mask = builder.build(torch.tensor([5]), bucket)
        assert isinstance(mask, torch.Tensor)
        assert int((mask == 0).sum()) == 6
        assert mask.shape[-1] == bucket
