"""Resolve every "auto" once, before anything is loaded, and keep the reason for each figure."""

from moespeq.plan.depth import DepthLimits
from moespeq.plan.machine import Machine, resolve_options
from moespeq.plan.memory import (
    DEFAULT_CONTEXT_TOK,
    SHORT_CONTEXT_TOK,
    MemoryNeeds,
    MemoryPlan,
    least_memory_bytes,
    plan_memory,
)
from moespeq.plan.workspace import Figure, cuda_scratch_bytes, most_image_tok

__all__ = [
    "DEFAULT_CONTEXT_TOK",
    "SHORT_CONTEXT_TOK",
    "DepthLimits",
    "Figure",
    "Machine",
    "MemoryNeeds",
    "MemoryPlan",
    "cuda_scratch_bytes",
    "least_memory_bytes",
    "most_image_tok",
    "plan_memory",
    "resolve_options",
]
