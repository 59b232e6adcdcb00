"""Dense tensors of a store as a model loads them: FP8 ones are bf16 by then, and their scales gone."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moespeq.model.quantization import Quantization
from moespeq.model.scaled_tensors import FP8_SCALES
from moespeq.nested import Scaled, ScaleGrid, exact_weight
from moespeq.store import TensorEntry

__all__ = ["dequantize_dense", "loaded_bytes"]


def loaded_bytes(entries: Iterable[TensorEntry]) -> int:
    """What tensors take once they are loaded."""
    return sum(_loaded_bytes(entry) for entry in entries)


def dequantize_dense(tensors: dict[str, torch.Tensor], quantization: Quantization | None) -> None:
    """Put bf16 weights in the place of FP8 ones, one after the other; their scales are taken out."""
    fp8 = [name for name, tensor in tensors.items() if tensor.dtype is torch.float8_e4m3fn]
    for name in fp8:
        assert quantization is not None, "the map of the checkpoint refuses FP8 without a configuration"
        codes, scales = tensors[name], tensors.pop(name + FP8_SCALES)
        tensors[name] = torch.stack(
            [
                exact_weight(
                    Scaled(matrix.view(torch.uint8), grid, ScaleGrid(*quantization.block, codes.shape[-2])),
                    quantization.layout,
                )
                for matrix, grid in zip(
                    codes.view(-1, *codes.shape[-2:]), scales.view(-1, *scales.shape[-2:]), strict=True
                )
            ]
        ).view(codes.shape)


def _loaded_bytes(entry: TensorEntry) -> int:
    if entry.dtype == "F8_E4M3":
        return 2 * entry.num_bytes
    return 0 if entry.name.endswith(FP8_SCALES) else entry.num_bytes
