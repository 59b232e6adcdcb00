"""Additive attention masks for passes over a static cache.

Shapes: T rows of a pass, B length bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moespeq.model.families import FAMILIES, MaskForm

__all__ = ["MaskBuilder"]

_SLIDING = ("sliding_attention", "hybrid_sliding")
_WITHOUT_MASK = ("linear_attention", "conv")  # layers with a state, which all of their rows belong to


class MaskBuilder:
    """Ready masks in the form a model's forward takes: one tensor, or one for each type of attention layer."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._window: int | None = getattr(config, "sliding_window", None) or None
        layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
        self._form = FAMILIES[config.model_type].masks
        attending = {name for name in layer_types if name.endswith("attention") or name.startswith("hybrid")}
        self._types = sorted({"full_attention", *attending} - {*_WITHOUT_MASK})
        self._is_sliding = self._window is not None and not layer_types and self._form is MaskForm.WINDOWED
        self._columns = torch.zeros(0, dtype=torch.long, device=device)

    def build(self, positions: torch.Tensor, bucket: int) -> torch.Tensor | Mapping[str, torch.Tensor | None]:
        """`positions` [T] is the last position each row may see; the mask is [1, 1, T, B] in the model's dtype."""
        if self._form is not MaskForm.BY_LAYER_TYPE:
            return self._mask(positions, bucket, self._window if self._is_sliding else None)
        full = self._mask(positions, bucket, None)
        window = full if self._window is None else self._mask(positions, bucket, self._window)
        masks = {name: window if name in _SLIDING else full for name in self._types}
        return masks | dict.fromkeys(_WITHOUT_MASK)

    def hide_only_what_follows(
        self, masks: torch.Tensor | Mapping[str, torch.Tensor | None], end: int
    ) -> Sequence[torch.Tensor]:
        """Those of `masks` that `build` made with no window shorter than the `end` positions there are."""
        has_window = self._window is not None and self._window < end
        if isinstance(masks, torch.Tensor):
            return [] if has_window and self._is_sliding else [masks]
        given = ((name, mask) for name, mask in masks.items() if mask is not None)
        return [mask for name, mask in given if not (has_window and name in _SLIDING)]

    def _mask(self, positions: torch.Tensor, bucket: int, window: int | None) -> torch.Tensor:
        if self._columns.numel() != bucket:
            self._columns = torch.arange(bucket, device=self._device)
        rows = positions[:, None]
        hidden = self._columns > rows  # [T, B]
        if window is not None:
            hidden |= self._columns <= rows - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[None, None]
