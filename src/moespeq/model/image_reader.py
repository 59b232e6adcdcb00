"""A checkpoint's own image processor: from pictures to what the model's forward takes, and to a prompt's tokens.

transformers' AutoProcessor cannot be made without torchvision (for videos, and Gemma's for its import alone). So the
image processor is taken by itself, in the form that needs Pillow alone, also where torchvision is there: then an image
has the same pixels on every machine. What stands for it in a prompt is written as the family's processor writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from moespeq.errors import CheckpointError, PromptError, UsageError
from moespeq.model.families import VISION, Vision
from moespeq.model.image_file import open_image
from moespeq.model.images import ImagePrompt, PlacedImage, PreparedImage
from moespeq.model.loading import one_line
from moespeq.model.tokenizer import Tokenizer
from moespeq.model.vision import image_token_id, why_no_images

__all__ = ["ImageReader", "check_takes_images", "why_no_images_in"]

_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_NUM_TOK = "num_soft_tokens_per_image"  # which is nothing to the model


def why_no_images_in(folder: Path, config: PreTrainedConfig) -> str | None:
    """Why the model of a folder takes no images; None where it does."""
    if (reason := why_no_images(config)) is not None:
        return reason
    if not any((folder / name).is_file() for name in _SETTINGS):
        return f"it comes without {_SETTINGS[0]}"
    return None


def check_takes_images(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UsageError where the model of a folder takes no images."""
    reason = why_no_images_in(folder, config)
    if reason is not None:
        raise UsageError(f"This {config.model_type} model takes no images: {reason}; leave them out.")


@dataclass(frozen=True)
class ImageReader:
    """most_tok: of one image; a larger one is scaled down to it where the family's processor can. Threads may share it:
    nothing in it changes.
    """

    config: PreTrainedConfig
    folder: Path
    tokenizer: Tokenizer
    most_tok: int

    def check(self) -> None:
        """Raise UsageError where no images are taken."""
        check_takes_images(self.folder, self.config)

    def read(self, data: bytes, what: str = "image") -> PreparedImage:
        """The image in the bytes of a file; `what` is what a person calls it. Raises UsageError or PromptError."""
        self.check()
        image, processor, bounds = open_image(data, what), self._processor, self._bounds
        try:
            found = processor(images=[image], return_tensors="pt", **bounds)
        except Exception as error:  # what it makes of a picture's shape, say 1 x 300
            raise PromptError(
                f"The model's processor refuses the {what} of {image.width} x {image.height} ({one_line(error)}); "
                "send another one."
            ) from error
        inputs: dict[str, Any] = dict(found)
        num_tok = self._num_tok(inputs)
        self._check_length(num_tok, what)
        written = f"{self._token(self._vision.before)}{self._image_token * num_tok}{self._token(self._vision.after)}"
        return PreparedImage(inputs, written, num_tok, _digest(inputs))

    def check_lengths(self, prompt: ImagePrompt) -> None:
        """Raise PromptError for an image that was read for another engine and is too long for this one."""
        for placed in prompt.images:
            self._check_length(placed.image.num_tok, "image")

    def place(self, text: str, images: Sequence[PreparedImage], *, most_tok: int | None = None) -> ImagePrompt:
        """The prompt of `text`, in which a token stands for each of `images` in turn. Raises PromptError."""
        parts = text.split(self._image_token)
        if len(parts) != len(images) + 1:
            raise PromptError(
                f"The text has {len(parts) - 1} places for {len(images)} images; leave '{self._image_token}' out of "
                "what is written, and give images where the chat template takes them."
            )
        between = [*(image.written for image in images), ""]
        written = "".join(part + image for part, image in zip(parts, between, strict=True))
        tokens = self.tokenizer.encode(written, add_special_tokens=False, most_tok=most_tok)
        return ImagePrompt(tokens, self._placed(tokens, images))

    def _check_length(self, num_tok: int, what: str) -> None:
        if num_tok > self.most_tok:
            raise PromptError(
                f"The {what} takes {num_tok} tokens, and one image may take {self.most_tok}; scale it down, or load "
                "with a larger context or prefill_rows (--ctx-size, --prefill-rows)."
            )

    def _placed(self, tokens: Sequence[int], images: Sequence[PreparedImage]) -> tuple[PlacedImage, ...]:
        """Where each image's tokens begin: the first of a run of them."""
        placed: list[PlacedImage] = []
        image_id, end = image_token_id(self.config), 0
        for image in images:
            begin = next((place for place in range(end, len(tokens)) if tokens[place] == image_id), len(tokens))
            end = begin + image.num_tok
            is_whole = list(tokens[begin:end]) == [image_id] * image.num_tok
            if not is_whole or (placed and placed[-1].end == begin):
                raise PromptError("Two images touch in this prompt; write something between them.")
            placed.append(PlacedImage(begin, image))
        return tuple(placed)

    @property
    def _vision(self) -> Vision:
        return VISION[self.config.model_type]

    @cached_property
    def _processor(self) -> Any:
        import transformers

        kind = getattr(transformers, self._vision.processor)
        try:
            return kind.from_pretrained(self.folder)
        except Exception as error:  # its settings are a file that somebody wrote
            raise CheckpointError(
                f"The image processor in {self.folder} cannot be loaded: {one_line(error)}"
            ) from error

    @cached_property
    def _bounds(self) -> dict[str, Any]:
        """Settings under which no image takes more than `most_tok` tokens, where the processor can scale to that."""
        size = getattr(self._processor, "size", None)
        if size is None or getattr(size, "longest_edge", None) is None:  # which are pixels of area, whatever the name
            return {}
        most_pixels = min(size.longest_edge, self.most_tok * (self._processor.patch_size * self._merged) ** 2)
        return {"size": {"shortest_edge": min(size.shortest_edge, most_pixels), "longest_edge": most_pixels}}

    @property
    def _merged(self) -> int:
        side: int = getattr(self.config.vision_config, self._vision.merged)
        return side

    def _num_tok(self, inputs: dict[str, Any]) -> int:
        if _NUM_TOK in inputs:
            return int(inputs.pop(_NUM_TOK)[0])
        return int(inputs["image_grid_thw"][0].prod()) // self._merged**2

    @cached_property
    def _image_token(self) -> str:
        return self.tokenizer.token(image_token_id(self.config))

    def _token(self, setting: str | None) -> str:
        return "" if setting is None else self.tokenizer.token(getattr(self.config, setting))


def _digest(inputs: dict[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(inputs):
        tensor = inputs[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.digest()
