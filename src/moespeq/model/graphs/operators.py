"""The two places where the forward leaves transformers' code, as operators that a compiler does not look into.

Owns the registration with torch and transformers, and the variable that says which pass is running. An operator takes
tensors only, so what else it needs (the layer, the cache, the records) the running pass knows: layers call in order.
Outside a compiled layer the pass is called directly.

Shapes: T rows, K experts a row, H hidden, A attention heads (Akv of keys), D head size, C columns of the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moespeq.errors import UsageError

__all__ = ["NAME", "RunningPass", "register", "running"]

NAME = "moespeq_graphs"


class RunningPass(Protocol):
    """Answers the calls of one forward; both are called once a layer, in layer order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
        """query [1, A, T, D], key and value [1, Akv, T, D] of the own rows, mask [1, 1, T, C] -> [1, T, A, D]."""
        ...

    def experts(self, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], routes and weights [T, K] -> [T, H]."""
        ...


_RUNNING: ContextVar[RunningPass] = ContextVar("moespeq_running_pass")


@contextmanager
def running(passing: RunningPass) -> Iterator[None]:
    """Let `passing` answer the forwards of this thread."""
    token = _RUNNING.set(passing)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def register() -> None:
    """Make both known to torch and transformers under NAME; calling it again changes nothing."""
    if NAME in ALL_EXPERTS_FUNCTIONS:
        return
    _define("experts", _experts, lambda hidden, routes, weights: torch.empty_like(hidden))
    _define("attend", _attend, _attended_like)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_function)
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, _attention_function)


def _define(name: str, function: Any, fake: Any) -> None:
    torch.library.custom_op(f"moespeq::{name}", function, mutates_args=()).register_fake(fake)


def _current() -> RunningPass:
    passing = _RUNNING.get(None)
    if passing is None:
        raise UsageError(
            "The experts are on the other side of the link: call generate, a bare forward cannot fetch them."
        )
    return passing


def _experts(hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
    return _current().experts(hidden, routes, weights)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    return _current().attend(query, key, value, mask, scaling)


def _attended_like(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _experts_function(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return _experts(hidden_states, top_k_index, top_k_weights)
    result: Tensor = torch.ops.moespeq.experts(hidden_states, top_k_index, top_k_weights)
    return result


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not torch.compiler.is_compiling():
        return _attend(query, key, value, attention_mask, scale), None
    return torch.ops.moespeq.attend(query, key, value, attention_mask, scale), None
