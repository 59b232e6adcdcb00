"""What an engine is made of, for assembly to put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moespeq.config import LoadOptions
from moespeq.decode.loop import SpeculativeLoop
from moespeq.model.image_reader import ImageReader
from moespeq.model.passes import Runner
from moespeq.model.tokenizer import Tokenizer
from moespeq.plan import MemoryPlan
from moespeq.ports import Clock
from moespeq.residency import Residency
from moespeq.store import Manifest
from moespeq.types import HostFill

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = ["EngineParts"]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """close: releases threads, files and memory; called once.

    retune: goes on with other options that take no memory; facts: how the passes run, for people.
    """

    options: LoadOptions
    manifest: Manifest
    plan: MemoryPlan
    runner: Runner
    loop: SpeculativeLoop
    residency: Residency
    retune: Callable[[LoadOptions], None]
    facts: Mapping[str, str]
    host_fill: Callable[[], HostFill]
    clock: Clock
    tokenizer: Tokenizer | None
    images: ImageReader | None
    generation_config: GenerationConfig
    vocab_size: int
    close: Callable[[], None]
