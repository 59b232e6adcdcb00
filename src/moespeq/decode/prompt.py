"""What a prompt may be, and its tokens: text, whole numbers, a 1-D integer tensor, or tokens with images. Everything
else is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Union

from moespeq.errors import PromptError, PromptLengthError

if TYPE_CHECKING:
    from torch import Tensor

    from moespeq.model.images import ImagePrompt

__all__ = ["Prompt", "prompt_tokens", "refuse_empty"]

Prompt = Union[str, Sequence[int], "Tensor", "ImagePrompt"]


def refuse_empty(prompt: Sized) -> None:
    """Of a text or its tokens. Raises PromptError."""
    if not len(prompt):
        raise PromptError("The prompt is empty; give at least one character.")


def prompt_tokens(
    prompt: Prompt, encode: Callable[[str], list[int]], *, vocab_size: int, context_tok: int
) -> list[int]:
    """Tokens of `prompt`, each in the vocabulary, with room for an answer behind them. Raises PromptError."""
    tokens = encode(prompt) if isinstance(prompt, str) else _whole_numbers(prompt)
    refuse_empty(tokens)
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise PromptError(f"Token {bad} is not in the vocabulary of {vocab_size}; check the tokenizer.")
    if len(tokens) >= context_tok:
        raise PromptLengthError(
            f"The prompt has {len(tokens)} tokens and the context {context_tok}, one of which the answer needs; "
            f"shorten the prompt or load with a larger ctx_size.",
            prompt_tok=len(tokens),
            context_tok=context_tok,
        )
    return tokens


def _whole_numbers(prompt: Sequence[int] | Tensor | ImagePrompt) -> list[int]:
    from torch import Tensor  # here, for a text is refused before torch is there

    from moespeq.model.images import ImagePrompt

    if isinstance(prompt, ImagePrompt):
        prompt = prompt.tokens
    if isinstance(prompt, Tensor):
        if prompt.dim() != 1:
            raise PromptError(
                f"The prompt is a tensor of shape {tuple(prompt.shape)}; give one sequence, of shape [n]."
            )
        prompt = prompt.tolist()
    elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise PromptError(f"The prompt must be text or a list of token ids, got {type(prompt).__name__}.")
    return [_whole_number(token) for token in prompt]


def _whole_number(token: object) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]  # what has no index is refused below
    except TypeError:
        pass
    raise PromptError(f"A token id must be a whole number, got {token!r}.")
