"""What a configuration says of images: whether they are taken, and what their rows are. Where the tower of a model is
and how it computes is transformers' business alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from moespeq.model.families import VISION
from moespeq.model.rotation import rope_switch_lengths
from moespeq.types import VisionShape

__all__ = ["describe_vision", "image_token_id", "sees_whole_images", "why_no_images"]


_NEEDS_TORCHVISION = "transformers reads images for it with torchvision only, and no test proves them yet"
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("kimi_k25", "llama4", "minimax_m3_vl"), _NEEDS_TORCHVISION)
)


def why_no_images(config: PreTrainedConfig) -> str | None:
    """Why a model takes no images; None where it does."""
    if getattr(config, "vision_config", None) is None:
        return "it has no part that sees"
    if config.model_type not in VISION:
        return _WHY_NOT.get(config.model_type, f"no test proves images of {config.model_type} yet")
    if rope_switch_lengths(config.get_text_config()):
        return "its rotary embedding changes with the length of the text"
    return None


def describe_vision(config: PreTrainedConfig) -> VisionShape | None:
    """What planning needs to know of the tower; None where no images are taken."""
    if why_no_images(config) is not None:
        return None
    tower: Any = config.vision_config
    return VisionShape(
        hidden_size=tower.hidden_size,
        intermediate_size=tower.intermediate_size,
        patches_per_tok=getattr(tower, VISION[config.model_type].merged) ** 2,
    )


def image_token_id(config: PreTrainedConfig) -> int:
    """The token that an image's places in a prompt hold."""
    token: int = config.image_token_id
    return token


def sees_whole_images(config: PreTrainedConfig) -> bool:
    """Whether layers with a window let a row of an image look at all rows of it, not only those before."""
    return getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"
