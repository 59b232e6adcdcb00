"""What a person asks of a model, for commands that generate: text or standard input, plain or as a chat."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moespeq.decode.engine import Engine

__all__ = ["read_prompt", "request_of"]


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`. Raises PromptError where it is empty."""
    from moespeq.decode.prompt import refuse_empty

    text = sys.stdin.buffer.read().decode(errors="surrogateescape") if prompt == "-" else prompt
    refuse_empty(text)
    return text


def request_of(engine: Engine, text: str, *, chat: bool, system: str | None) -> str | list[int]:
    """The text, or the tokens of a conversation where a chat or a system message is asked for."""
    if not chat and not system:
        return text
    messages = [{"role": "system", "content": system}] if system else []
    return engine.tokenizer.encode_chat([*messages, {"role": "user", "content": text}])
