"""Images as a prompt holds them: values only. `image_file` reads files, `image_reader` makes tensors of them.

Shapes: n tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ImagePrompt", "PlacedImage", "PreparedImage"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """An image as a model's forward takes it.

    inputs: tensors by the forward's names; written: what stands for it in a prompt, num_tok of whose tokens are its
    own; digest: of the inputs, so that equal ones are the same image.
    """

    inputs: Mapping[str, torch.Tensor]
    written: str
    num_tok: int
    digest: bytes

    @property
    def num_bytes(self) -> int:
        """Host memory that its tensors take."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image whose tokens are those from `begin` on."""

    begin: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """Behind its last token."""
        return self.begin + self.image.num_tok


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt with images: its tokens [n], and the images in order, no two of which touch."""

    tokens: Sequence[int]
    images: Sequence[PlacedImage]

    def __len__(self) -> int:
        return len(self.tokens)
