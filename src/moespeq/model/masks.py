"""Additive attention masks for passes over a static cache.

Shapes: T rows of a pass, B length bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moespeq.model.families import FAMILIES, MaskForm

__all__ = ["MaskBuilder"]

_FULL = "full_attention"
_SLIDING = ("sliding_attention", "hybrid_sliding")
_CHUNKED = "chunked_attention"
_WITHOUT_MASK = ("linear_attention", "conv")  # layers with a state, which all of their rows belong to


class MaskBuilder:
    """Ready masks in the form a model's forward takes: one tensor, or one for each type of attention layer."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._window: int | None = getattr(config, "sliding_window", None) or None
        self._chunk: int | None = getattr(config, "attention_chunk_size", None) or None
        layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
        self._form = FAMILIES[config.model_type].masks
        attending = {name for name in layer_types if name.endswith("attention") or name.startswith("hybrid")}
        self._types = sorted({_FULL, *attending} - {*_WITHOUT_MASK})
        self._only_type = _SLIDING[0] if self._form is MaskForm.WINDOWED else _FULL
        self._columns = torch.zeros(0, dtype=torch.long, device=device)

    def build(
        self, positions: torch.Tensor, bucket: int, *, ahead: torch.Tensor | None = None
    ) -> torch.Tensor | Mapping[str, torch.Tensor | None]:
        """`positions` [T] is the last position each row may see; the mask is [1, 1, T, B] in the model's dtype.

        ahead: [T], the same for layers with a window, where a row sees on to there.
        """
        if self._form is not MaskForm.BY_LAYER_TYPE:
            return self._mask(positions, bucket, self._only_type)
        full, last = self._mask(positions, bucket, _FULL), positions if ahead is None else ahead
        masks = {
            name: full if self._reach(name) is None else self._mask(positions, bucket, name, last=last)
            for name in self._types
        }
        return masks | dict.fromkeys(_WITHOUT_MASK)

    def hide_only_what_follows(
        self, masks: torch.Tensor | Mapping[str, torch.Tensor | None], end: int
    ) -> Sequence[torch.Tensor]:
        """Those of `masks` that `build` made with no window shorter than the `end` positions there are."""
        given = {self._only_type: masks} if isinstance(masks, torch.Tensor) else masks
        return [mask for name, mask in given.items() if mask is not None and (self._reach(name) or end) >= end]

    def _reach(self, layer_type: str) -> int | None:
        """How many positions a row sees at most; None for all before it."""
        if layer_type in _SLIDING:
            return self._window
        return self._chunk if layer_type == _CHUNKED else None

    def _mask(
        self, positions: torch.Tensor, bucket: int, layer_type: str, *, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._columns.numel() != bucket:
            self._columns = torch.arange(bucket, device=self._device)
        rows, reach = positions[:, None], self._reach(layer_type)
        hidden = self._columns > (rows if last is None else last[:, None])  # [T, B]
        if reach is not None:
            hidden |= self._columns < (rows // reach * reach if layer_type == _CHUNKED else rows - reach + 1)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[None, None]
