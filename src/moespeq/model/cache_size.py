"""How large a model's keys, values and states are: its own forward run for one token without memory (on `meta`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from moespeq.kernels import ExpertMath
from moespeq.model import experts
from moespeq.model.caches import new_cache
from moespeq.model.empty import empty_model
from moespeq.model.experts import ExpertsSwitch, tag
from moespeq.model.masks import MaskBuilder
from moespeq.model.quantizer import experts_modules
from moespeq.model.recurrent import RecurrentStates
from moespeq.model.rotation import without_looking

__all__ = ["CacheSize", "cache_size"]

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class CacheSize:
    """kv_bytes: a token's keys and values, in all layers; state_bytes: what layers with a state hold, at any length."""

    kv_bytes: int
    state_bytes: int


def cache_size(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> CacheSize:
    """Of a model of `config`; nothing is loaded."""
    model = empty_model(without_looking(config), dtype)  # positions of `meta` have no values
    text = config.get_text_config()
    states, switch = RecurrentStates(rows=0), ExpertsSwitch()
    cache = new_cache(model, 1, _META, states)
    cache.cursor.move(0, 1, 1)
    states.begin_target(0, 1, by_row=False)
    experts.register()
    model.set_experts_implementation(experts.IMPLEMENTATION)
    tag([module for _, module in experts_modules(model)], switch)
    place = torch.zeros(1, dtype=torch.long, device=_META)
    masks = MaskBuilder(text, dtype, _META).build(place, 1)
    with switch.using(_nothing), torch.inference_mode():
        model(
            input_ids=place[None], position_ids=place[None], attention_mask=masks, past_key_values=cache, use_cache=True
        )
    return CacheSize(cache.num_bytes, states.bytes_of_one)


def _nothing(
    layer: int, math: ExpertMath, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return torch.zeros_like(hidden)
