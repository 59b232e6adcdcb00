"""How a checkpoint's own configuration says that its weights are quantised, and what is not taken of that.

Judged by `config.json` and by the names of tensors; nothing is read of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moespeq.errors import UnsupportedModelError

__all__ = ["check_quantization", "check_tensor_names"]

_INSTEAD = (
    "moespeq makes its own base from exact weights; use the bf16 checkpoint that it was made from, or a fine-tune of "
    "that in bf16, instead"
)
# Tensors of packed codes, by the end of their names: GPTQ's and AWQ's, bitsandbytes', HQQ's.
_PACKED = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".quant_map": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
    ".W_q": "HQQ",
}


def check_quantization(family: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for weights quantised in a form that is not taken, with what to use instead."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    raise UnsupportedModelError(f"This {family} checkpoint is quantised ({method}) and {_INSTEAD}.")


def check_tensor_names(names: Iterable[str]) -> None:
    """Raise UnsupportedModelError for tensors of packed codes, which old checkpoints hold without saying so."""
    for name in names:
        method = next((method for end, method in _PACKED.items() if name.endswith(end)), None)
        if method is not None:
            raise UnsupportedModelError(f"Tensor {name!r} holds quantised weights ({method}) and {_INSTEAD}.")
