"""What a person asks of a model, for commands that generate: text or standard input, plain or as a chat."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moespeq.decode.engine import Engine, Prompt

__all__ = ["read_images", "read_prompt", "request_of"]


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`. Raises PromptError where it is empty."""
    from moespeq.decode.prompt import refuse_empty

    text = sys.stdin.buffer.read().decode(errors="surrogateescape") if prompt == "-" else prompt
    refuse_empty(text)
    return text


def read_images(paths: Sequence[str]) -> list[tuple[str, bytes]]:
    """Files, behind what a person calls them. Raises PromptError where one cannot be read."""
    from moespeq.model.image_file import read_image_file

    return [(f"image {path}", read_image_file(path)) for path in paths]


def request_of(
    engine: Engine, text: str, *, chat: bool, system: str | None, images: Sequence[tuple[str, bytes]] = ()
) -> Prompt:
    """The text, or where a chat, a system message or images are asked for, the prompt of one, images before text."""
    if not (chat or system or images):
        return text
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    parts = [{"type": "image", "image": engine.images.read(data, what)} for what, data in images]
    return engine.encode_chat([*messages, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}])
