"""The prompt of a conversation: text alone, or with images between it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moespeq.errors import UsageError
from moespeq.model.image_reader import ImageReader
from moespeq.model.images import ImagePrompt, PreparedImage
from moespeq.model.tokenizer import Tokenizer

__all__ = ["chat_prompt"]


def chat_prompt(
    tokenizer: Tokenizer,
    reader: ImageReader | None,
    messages: Sequence[dict[str, Any]],
    *,
    most_tok: int | None = None,
    **rendering: Any,
) -> list[int] | ImagePrompt:
    """Tokens of `messages` by the chat template, as `Tokenizer.encode_chat`, and their images where they have some.

    Parts of a content that hold no image between them become one text. Raises UsageError or PromptError.
    """
    images = [part["image"] for part in _parts(messages) if part.get("type") == "image"]
    if not images:
        return tokenizer.encode_chat([_as_text(message) for message in messages], most_tok=most_tok, **rendering)
    if reader is None or not all(isinstance(image, PreparedImage) for image in images):
        raise UsageError("An image of a chat is what `engine.images.read` makes of a file; give that.")
    reader.check()
    text = tokenizer.render_chat([_for_template(message) for message in messages], **rendering)
    return reader.place(text, images, most_tok=most_tok)


def _parts(messages: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, Mapping)]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Parts joined: templates of models that read text alone take no others."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and "text" in part for part in parts):
        return message
    return {**message, "content": "".join(str(part["text"]) for part in parts)}


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Without the pixels, which are none of the template's business."""
    if _parts([message]) and any(part.get("type") == "image" for part in _parts([message])):
        parts = [{"type": "image"} if part.get("type") == "image" else dict(part) for part in message["content"]]
        return {**message, "content": parts}
    return _as_text(message)
