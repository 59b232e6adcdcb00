"""What a model's rotary embedding does with positions: nothing but turn by them, or choose by how long the text is.

Long-rope has two sets of factors, and all keys of a text are turned by the one its length asks for: behind that length
keys turned by the other are to be computed anew. Dynamic scaling begins past the context that a model was made for,
which no engine goes past; but it looks.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["looks_at_positions", "rope_switch_lengths", "without_looking"]

_SWITCHES, _LOOKS = "longrope", ("longrope", "dynamic")


def rope_switch_lengths(config: PreTrainedConfig) -> list[int]:
    """Lengths at which the rotary embedding itself changes."""
    switching = [one for one in _rotations(config) if one.get("rope_type") == _SWITCHES]
    named = getattr(config, "original_max_position_embeddings", None)
    lengths = {one.get("original_max_position_embeddings") or named for one in switching}
    return sorted(int(length) for length in lengths if length)


def looks_at_positions(config: PreTrainedConfig) -> bool:
    """Whether its code asks how long the text is: such a pass is no graph, and needs positions that have values."""
    return any(one.get("rope_type") in _LOOKS for one in _rotations(config))


def without_looking(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration of the same sizes whose passes do not ask."""
    if not looks_at_positions(config.get_text_config()):
        return config
    plain = copy.deepcopy(config)
    for one in _rotations(plain.get_text_config()):
        if one.get("rope_type") in _LOOKS:
            one["rope_type"] = "default"
    return plain


def _rotations(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Its parameters: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
