"""Additive attention masks for passes over a static cache.

Shapes: T rows of a pass, B length bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["MaskBuilder"]


class MaskBuilder:
    """Ready masks in the form a model's forward takes: one tensor, or one for each attention type."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._window: int | None = getattr(config, "sliding_window", None) or None
        layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
        self._takes_mapping = config.model_type in _MAPPING_MODELS
        self._is_sliding = self._window is not None and not layer_types and config.model_type in _SLIDING_MODELS
        self._columns = torch.zeros(0, dtype=torch.long, device=device)

    def build(self, positions: torch.Tensor, bucket: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """`positions` [T] is the last position each row may see; the mask is [1, 1, T, B] in the model's dtype."""
        if self._takes_mapping:
            window = self._window if self._window is not None else bucket
            return {
                "full_attention": self._mask(positions, bucket, None),
                "sliding_attention": self._mask(positions, bucket, window),
            }
        return self._mask(positions, bucket, self._window if self._is_sliding else None)

    def hide_only_what_follows(
        self, masks: torch.Tensor | Mapping[str, torch.Tensor], end: int
    ) -> Sequence[torch.Tensor]:
        """Those of `masks` that `build` made with no window shorter than the `end` positions there are."""
        has_window = self._window is not None and self._window < end
        if isinstance(masks, torch.Tensor):
            return [] if has_window and self._is_sliding else [masks]
        return [masks["full_attention"]] if has_window else list(masks.values())

    def _mask(self, positions: torch.Tensor, bucket: int, window: int | None) -> torch.Tensor:
        if self._columns.numel() != bucket:
            self._columns = torch.arange(bucket, device=self._device)
        rows = positions[:, None]
        hidden = self._columns > rows  # [T, B]
        if window is not None:
            hidden |= self._columns <= rows - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[None, None]


# Which form the forward takes is written in each model's code, not in its configuration.
_MAPPING_MODELS = frozenset({"qwen2_moe", "gpt_oss"})
_SLIDING_MODELS = frozenset({"mixtral", "qwen3_moe", "phimoe"})
