"""By which positions the rotary embedding turns the rows of a text: their places, unless it has images and the model
gives an image's rows three (in time, height and width), which are fewer than its rows.

Shapes: T rows of a pass, n tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from moespeq.model.images import PlacedImage

__all__ = ["RowPositions"]


class RowPositions:
    """Mutable: `begin` once a text. Where it stands in the cache and what masks show of it is by places alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._of_prompt: torch.Tensor | None = None  # [3, n], where they are not the places
        self._behind = 0  # what is added to places behind the prompt

    def begin(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """A text with this prompt follows, by transformers' own positions of it."""
        index = getattr(self._model.base_model, "get_rope_index", None)
        self._of_prompt, self._behind = None, 0
        if index is None or not images:
            return
        is_image = torch.zeros(1, len(tokens), dtype=torch.int)
        for placed in images:
            is_image[0, placed.begin : placed.end] = 1
        grids = torch.cat([placed.image.inputs["image_grid_thw"] for placed in images])
        positions, behind = index(torch.tensor([tokens]), is_image, image_grid_thw=grids)
        self._of_prompt, self._behind = positions[:, 0].to(self._model.device), int(behind)

    def of(self, places: torch.Tensor) -> torch.Tensor:
        """Of rows at `places` [T]: as the forward takes them, [1, T], or [4, 1, T] with the places in front."""
        if self._of_prompt is None:
            return places[None]
        prompt_tok = self._of_prompt.shape[1]
        in_prompt = self._of_prompt[:, places.clamp(max=prompt_tok - 1)]
        turned = torch.where(places < prompt_tok, in_prompt, places + self._behind)
        return torch.cat([places[None], turned])[:, None]
