"""The cache a model's passes write: keys and values, states, or both, in the class its forward asks for."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from moespeq.model.compressed_kv import CompressedKVLayer, OneTensorLayer
from moespeq.model.kv_cache import KVCursor, SharedCache, StaticKVLayer
from moespeq.model.recurrent import RecurrentStates, wrap_mixers

__all__ = ["new_cache"]


def new_cache(model: PreTrainedModel, length: int, device: torch.device, states: RecurrentStates) -> SharedCache:
    """A cache of `length` positions; mixers with a state are put behind ours, which keep theirs in `states`."""
    config = model.config.get_text_config()
    kind = _LinearCache if config.model_type == "minimax" else SharedCache
    new_static = partial(_deepseek_v4_layer, config) if config.model_type == "deepseek_v4" else None
    return kind(config.num_hidden_layers, length, device, wrap_mixers(model, states), new_static)


def _deepseek_v4_layer(config: PreTrainedConfig, layer: int, length: int, cursor: KVCursor) -> StaticKVLayer:
    layer_type = config.layer_types[layer]
    window = config.compress_rates.get(layer_type)
    if window is None:
        return OneTensorLayer(length, cursor)
    return CompressedKVLayer(length, cursor, window=window, overlaps=layer_type == "compressed_sparse_attention")


class _LinearCache(SharedCache, MiniMaxCache):  # type: ignore[misc]
    """MiniMax's forward takes no other class and calls a layer's state its linear cache."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state behind the last row; None at the start of a text."""
        return self.layers[layer_idx].recurrent_states[0] if self.has_previous_state(layer_idx) else None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Make it the running state."""
        layer = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True

    def __len__(self) -> int:
        return len(self.layers)
