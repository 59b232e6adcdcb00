"""Which layout the records of a checkpoint's experts get: chosen where they are bf16, else that of their dtype.

Also what is known of a record's size before it is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from moespeq.errors import UnsupportedModelError
from moespeq.nested import Layout

__all__ = ["EXPECTED_BITS", "layouts_of"]

# Of a record, a weight; of residuals measured on four trained models and rounded up.
EXPECTED_BITS: Mapping[Layout, float] = MappingProxyType(
    {Layout.FIXED: 9.0, Layout.CODE_WIDTH: 8.0, Layout.PLAIN: 16.0, Layout.FP16: 16.0}
)
_OF_DTYPE = {"F16": Layout.FP16}


def layouts_of(dtypes: Sequence[str], bf16: Layout) -> tuple[Layout, ...]:
    """The layout of each layer, whose experts are written in `dtypes`; `bf16` is that of bf16 experts.

    Raises UnsupportedModelError for a dtype that is not stored exactly.
    """
    return tuple(bf16 if dtype == "BF16" else _layout_of(dtype) for dtype in dtypes)


def _layout_of(dtype: str) -> Layout:
    if dtype == "F32":
        raise UnsupportedModelError(
            "The experts of this checkpoint are fp32, which is never stored as it is; --convert-to bf16 "
            "(convert_to='bf16') rounds them to bf16, which is what most such models are run in."
        )
    if dtype not in _OF_DTYPE:
        raise UnsupportedModelError(
            f"The experts of this checkpoint are {dtype}, and only bf16 and fp16 are taken; use a checkpoint in bf16."
        )
    return _OF_DTYPE[dtype]
