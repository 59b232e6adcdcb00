"""Every error a person can meet, as one tree.

    MoespeqError                 one sentence: what happened, the number, what to do next
    ├── UsageError               an argument or option is wrong
    │   └── PromptError          the prompt is empty, or no text or tokens of this model
    │       └── PromptLengthError  it is too long for the context
    ├── CheckpointError          the source checkpoint is missing, damaged or not what it claims
    │   └── UnsupportedModelError  a family, dtype or layout that no test proves yet
    ├── StoreError               a store is missing, damaged, of another schema, or in use
    ├── BudgetError              the memory asked for does not hold what must be resident
    ├── StorageError             the disk is full, or a read or write failed
    └── UnavailableError         a server does not take this request now, and says when to ask again
        └── OverloadError        its queue is full

The command line prints the sentence and exits with code 2; anything outside this tree is our bug, with its traceback.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CheckpointError",
    "MoespeqError",
    "OverloadError",
    "PromptError",
    "PromptLengthError",
    "StorageError",
    "StoreError",
    "TraceError",
    "UnavailableError",
    "UnsupportedModelError",
    "UsageError",
]


class MoespeqError(Exception):
    """Base of all errors that are explained to the user in one sentence."""


class UsageError(MoespeqError):
    """An argument or option is wrong."""


class PromptError(UsageError):
    """The prompt is empty, or no text or tokens of this model."""


class PromptLengthError(PromptError):
    """The prompt is too long: `prompt_tok`, where the context of `context_tok` keeps one for the answer."""

    def __init__(self, sentence: str, *, prompt_tok: int, context_tok: int) -> None:
        super().__init__(sentence)
        self.prompt_tok, self.context_tok = prompt_tok, context_tok


class CheckpointError(MoespeqError):
    """The source checkpoint is missing, damaged or not what it claims."""


class UnsupportedModelError(CheckpointError):
    """A model family, dtype or layout that no test proves yet."""


class StoreError(MoespeqError):
    """A store is missing, damaged, of another schema version, or in use."""


class StoreInUseError(StoreError):
    """Another process is preparing this store; it comes, or can be gone on with."""


class BudgetError(MoespeqError):
    """The memory asked for does not hold what must be resident."""


class StorageError(MoespeqError):
    """The disk is full, or a read or write failed."""


class TraceError(MoespeqError):
    """A routing trace is missing, damaged or of another schema version, or cannot be written."""


class UnavailableError(MoespeqError):
    """A server does not take this request now; `retry_after_s` is when to ask again."""

    def __init__(self, sentence: str, *, retry_after_s: int) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class OverloadError(UnavailableError):
    """The queue of a server is full."""
