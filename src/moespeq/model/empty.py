"""A model of a configuration without memory for its weights, by the class that writes text: transformers' causal one,
else, and where we let it, the one that reads images too; with a shim of ours where its family needs one.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from moespeq.errors import UnsupportedModelError
from moespeq.model import shims
from moespeq.model.vision import why_no_images

__all__ = ["empty_model"]


def empty_model(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """On the device `meta`. Raises UnsupportedModelError for a text that transformers has no class for, and whatever a
    configuration breaks whose values do not fit together.
    """
    is_causal = type(config) in AutoModelForCausalLM._model_mapping and why_no_images(config) is not None
    auto = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        raise UnsupportedModelError(
            f"transformers knows model type {config.model_type!r} only as a part of a model of images; use a "
            "checkpoint whose config.json holds it as text_config."
        )
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    shims.install(model)
    return model
