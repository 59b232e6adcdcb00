"""How a checkpoint's own configuration says that its weights are quantised, and what is taken of that.

Judged by `config.json` and by the names of tensors; nothing is read of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moespeq.errors import UnsupportedModelError
from moespeq.nested import Layout

__all__ = ["Quantization", "check_tensor_names", "quantization_of"]

_INSTEAD = (
    "moespeq makes its own base from exact weights; use the bf16 checkpoint that it was made from, or one in "
    "block-scaled FP8, instead"
)
# Tensors of packed codes, by the end of their names.
_PACKED = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".quant_map": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
    ".W_q": "HQQ",
}
_MXFP4_BLOCK = (1, 32)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights of codes and scales that are taken as they are: `layout` of their records, (rows, columns) of a scale."""

    layout: Layout
    block: tuple[int, int]


def quantization_of(family: str, config: Mapping[str, Any]) -> Quantization | None:
    """How weights are quantised; None where they are not.

    Raises UnsupportedModelError for a form that is not taken, with what to use instead.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return None
    method = fields.get("quant_method") if isinstance(fields, Mapping) else fields
    if method == "fp8":
        return Quantization(Layout.FP8, _fp8_block(family, fields))
    if method == "mxfp4":
        return Quantization(Layout.MXFP4, _MXFP4_BLOCK)
    raise UnsupportedModelError(f"This {family} checkpoint is quantised ({method}) and {_INSTEAD}.")


def check_tensor_names(names: Iterable[str]) -> None:
    """Raise UnsupportedModelError for tensors of packed codes, which old checkpoints hold without saying so."""
    for name in names:
        method = next((method for end, method in _PACKED.items() if name.endswith(end)), None)
        if method is not None:
            raise UnsupportedModelError(f"Tensor {name!r} holds quantised weights ({method}) and {_INSTEAD}.")


def _fp8_block(family: str, fields: Mapping[str, Any]) -> tuple[int, int]:
    sides = fields.get("weight_block_size")
    block = [side for side in sides if type(side) is int and side > 0] if isinstance(sides, list) else []
    is_known = fields.get("fmt", "e4m3") == "e4m3" and fields.get("activation_scheme", "dynamic") == "dynamic"
    if len(block) != 2 or sides != block or not is_known:
        raise UnsupportedModelError(
            f"This {family} checkpoint is FP8 with {dict(fields)}, and only e4m3 with a weight_block_size and dynamic "
            "activations is taken, as DeepSeek-V3's and Qwen3's; use the bf16 checkpoint of the same model instead."
        )
    return block[0], block[1]
