"""Load a transformers model without ever materialising its routed experts.

transformers lets a quantizer change the meta model before weights are loaded. Ours deletes the expert matrices, so no
memory is taken for them and no checkpoint tensor is looked for; expert biases stay, as dense weights do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moespeq.model import shims

__all__ = ["METHOD", "ExpertsElsewhereConfig", "experts_modules", "register"]

METHOD = "moespeq"
_MATRIX_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def experts_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The routed-experts modules of a model in layer order: those with transformers' experts interface."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "_apply_gate")
    ]


class ExpertsElsewhereConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Says that the routed experts live in a moespeq store."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(quant_method=METHOD)


class ExpertsElsewhereQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts shims in and deletes expert matrices from the meta model; everything else loads as it always does."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        shims.install(model)
        for _, module in experts_modules(model):
            for name in _MATRIX_NAMES:
                module._parameters.pop(name, None)
            module._is_hf_initialized = True  # type: ignore[assignment]  # nothing is left to draw at random

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def register() -> None:
    """Make the quantizer known to transformers; calling it again changes nothing."""
    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    register_quantization_config(METHOD)(ExpertsElsewhereConfig)
    register_quantizer(METHOD)(ExpertsElsewhereQuantizer)
