"""The nouns shared by every layer: experts, fetches, routes and reports. No torch, no I/O.

Words are those of docs/glossary: a *round* drafts k tokens and verifies k + 1 rows; a *record* is one expert's bytes;
a *slot* is room for one record on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

__all__ = [
    "Cause",
    "Completion",
    "ExpertKey",
    "Fetch",
    "FinishReason",
    "ModelShape",
    "StepReport",
    "VisionShape",
]


class ExpertKey(NamedTuple):
    """One routed expert: MoE layer (counted over MoE layers only, from 0) and expert id inside it."""

    layer: int
    expert: int


class Cause(IntEnum):
    """Why a record is moved; smaller is more urgent. BASE: between two passes, the base of an expert alone."""

    DEMAND = 0
    STAGE = 1
    SATURATE = 2
    PREFETCH = 3
    PRIME = 4
    BASE = 5


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copy one record into one slot. `num_bytes`: what the link carries, the whole record or, where its base is
    resident, what follows the base in it: always the record's end.
    """

    key: ExpertKey
    slot: int
    num_bytes: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Completion:
    """A fetch that ended. `error` is None, or the sentence to raise where the record is needed.

    ended_s: when, on the engine's clock, where the mover knows it; who takes the completion may be late. bug: what went
    wrong where nobody wrote a sentence for it, to be raised when the completion has been taken in.
    """

    fetch: Fetch
    seconds: float
    error: str | None = None
    ended_s: float | None = None
    bug: Exception | None = None


@dataclass(frozen=True, slots=True)
class HostFill:
    """How far the records in host memory are loaded; both 0 where they come from the disk each time."""

    filled_bytes: int = 0
    total_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing is left to load."""
        return self.filled_bytes >= self.total_bytes


@dataclass(frozen=True, slots=True)
class VisionShape:
    """What planning needs to know of the part of a model that sees. patches_per_tok: of an image, in the tower."""

    hidden_size: int
    intermediate_size: int
    patches_per_tok: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What planning and policy need to know of a model; made by `model.describe()`, free of torch.

    `matrices` maps a routed matrix's name to (out, in), the same for every expert of the model. state_bytes: what
    layers without keys and values (linear attention, state space) remember at one position. vision: of a model that
    takes images.
    """

    model_type: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    vocab_size: int
    max_context_tok: int
    matrices: tuple[tuple[str, int, int], ...]
    kv_bytes_per_tok: int
    state_bytes: int = 0
    vision: VisionShape | None = None

    @property
    def weights_per_expert(self) -> int:
        """Number of routed weights in one expert."""
        return sum(rows * cols for _, rows, cols in self.matrices)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One round as measured: what was drafted and kept, what crossed the link and why, and where the time went.

    stall_s: the target waited with nothing to compute; link_busy_s: a copy was on the link; stall_busy_s: both.
    used_bytes: records used for the first time since they crossed the link. confidences: the draft's probabilities of
    its k tokens, where the governor asked for them.
    """

    k: int
    accepted: int
    committed: int
    hits: int
    late: int
    misses: int
    draft_s: float
    verify_s: float
    stall_s: float
    bytes_by_cause: dict[Cause, int] = field(default_factory=dict)
    link_busy_s: float = 0.0
    stall_busy_s: float = 0.0
    used_bytes: int = 0
    confidences: Sequence[float] = ()

    @property
    def link_bytes(self) -> int:
        """Bytes that crossed the link in this round, whatever the cause."""
        return sum(self.bytes_by_cause.values())
