"""Which layout the records of a checkpoint's experts get: chosen where they are bf16, else that of their dtype.

Also what is known of a record's size before it is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from moespeq.errors import UnsupportedModelError, UsageError
from moespeq.model.loading import load_config
from moespeq.model.scaled_tensors import MXFP4_DTYPE
from moespeq.model.supported import read_quantization
from moespeq.nested import DEFAULT_FORMAT, BaseFormat, Layout

__all__ = ["CONVERTIBLE", "EXPECTED_BITS", "check_base", "default_format", "dtype_by_config", "layouts_of"]

# Of a record, a weight; of residuals measured on four trained models and rounded up.
EXPECTED_BITS: Mapping[Layout, float] = MappingProxyType(
    {
        Layout.FIXED: 9.0,
        Layout.CODE_WIDTH: 8.0,
        Layout.PLAIN: 16.0,
        Layout.FP16: 16.0,
        Layout.FP8: 8.01,
        Layout.MXFP4: 4.26,
    }
)
CONVERTIBLE = ("F32", "F16")
_BY_CONFIG = {torch.float32: "F32", torch.float16: "F16"}
_OF_DTYPE = {"F16": Layout.FP16, "F8_E4M3": Layout.FP8, MXFP4_DTYPE: Layout.MXFP4}
MXFP4_FORMAT, MXFP4_BITS = replace(DEFAULT_FORMAT, bits=3), 4


def layouts_of(dtypes: Sequence[str], bf16: Layout) -> tuple[Layout, ...]:
    """The layout of each layer, whose experts are written in `dtypes`; `bf16` is that of bf16 experts.

    Raises UnsupportedModelError for a dtype that is not stored exactly.
    """
    return tuple(bf16 if dtype == "BF16" else _layout_of(dtype) for dtype in dtypes)


def default_format(folder: Path) -> BaseFormat:
    """The base that a checkpoint gets where none is asked for. Raises CheckpointError."""
    quantization = read_quantization(folder)
    is_mxfp4 = quantization is not None and quantization.layout is Layout.MXFP4
    return MXFP4_FORMAT if is_mxfp4 else DEFAULT_FORMAT


def dtype_by_config(folder: Path) -> str:
    """What a checkpoint's experts are most likely written in, by `config.json` alone, as safetensors calls it."""
    quantization = read_quantization(folder)
    if quantization is not None:
        return "F8_E4M3" if quantization.layout is Layout.FP8 else MXFP4_DTYPE
    return _BY_CONFIG.get(load_config(folder).get_text_config().dtype, "BF16")


def check_base(layouts: Sequence[Layout], fmt: BaseFormat) -> None:
    """Raise UsageError for a base that is no smaller than the target's own numbers."""
    if Layout.MXFP4 in layouts and fmt.bits >= MXFP4_BITS:
        raise UsageError(
            f"The experts of this checkpoint are MXFP4, {MXFP4_BITS} bits a weight and 0.25 of scales: a base of "
            f"{fmt.bits} bits would be as large as they are and less exact; use --bits 3 or --bits 2."
        )


def _layout_of(dtype: str) -> Layout:
    if dtype == "F32":
        raise UnsupportedModelError(
            "The experts of this checkpoint are fp32, which is never stored as it is; --convert-to bf16 "
            "(convert_to='bf16') rounds them to bf16, which is what most such models are run in."
        )
    if dtype not in _OF_DTYPE:
        raise UnsupportedModelError(
            f"The experts of this checkpoint are {dtype}, and only bf16, fp16, FP8 (e4m3) and MXFP4 are taken; use a "
            "checkpoint in bf16."
        )
    return _OF_DTYPE[dtype]
