"""Engines for tests: stores of tiny models, memory forced small, and drafts made worse on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.decode.planning import needs_of
from moespeq.decode.sampling import DraftToken, Sampler
from moespeq.model.weights import ExpertWeights
from moespeq.plan import Machine, plan_memory, resolve_options
from moespeq.prepare.experts import decode_expert
from moespeq.store import Store
from moespeq.types import ExpertKey

__all__ = ["flip_schedule", "memory_for", "noisy_draft", "open_tight", "prompts"]


def memory_for(store: Path, num_slots: int, **options: Any) -> int:
    """The device budget that leaves exactly `num_slots` slots."""
    with Store.open(store) as opened:
        needs = needs_of(opened, options.get("records", "store"))
    machine = Machine(1 << 40, gpu_free_bytes=1 << 40 if options.get("device") == "cuda" else None)
    roomy = plan_memory(needs, resolve_options(LoadOptions(**options), machine), machine)
    return roomy.total_bytes - roomy.slots_bytes + num_slots * roomy.slot_bytes


def open_tight(store: Path, num_slots: int, *, dtype: torch.dtype | None = None, **options: Any) -> Engine:
    """An engine whose slots hold only `num_slots` experts."""
    memory = memory_for(store, num_slots, **options)
    return open_engine(store, LoadOptions(device_memory=memory, **options), dtype=dtype)


def prompts(count: int, *, length: int = 12, vocab_size: int = 320, seed: int = 7) -> list[list[int]]:
    """Random token prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length + index,), generator=generator).tolist() for index in range(count)]


def noisy_draft(patch: pytest.MonkeyPatch, store: Path, noise: float) -> None:
    """Let the draft multiply with the target's own weights plus `noise` standard deviations; 0 errs (almost) never."""
    with Store.open(store) as opened:
        exact = {key: decode_expert(opened, key) for key in list(opened.keys())}

    def worse(matrix: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return matrix + noise * matrix.std() * torch.randn(matrix.shape, generator=generator)

    drafted = {
        key: [
            worse(matrix.float(), torch.Generator().manual_seed(1000 * key.layer + key.expert)) for matrix in matrices
        ]
        for key, matrices in exact.items()
    }

    def base(self: ExpertWeights, layer: int, expert: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [matrix.to(dtype) for matrix in drafted[ExpertKey(layer, expert)]]

    patch.setattr(ExpertWeights, "base", base)


def flip_schedule(patch: pytest.MonkeyPatch, k: int) -> None:
    """Round after round, flip the drafted token at step 0, 1, ..., k - 1, and in every (k + 1)-th round at none."""
    honest, rounds = Sampler.draft_token, iter(range(10**9))
    flip_at = [k]

    def flipping(self: Sampler, logits: torch.Tensor, position: int, drafted: Sequence[torch.Tensor]) -> DraftToken:
        if not drafted:
            flip_at[0] = next(rounds) % (k + 1)
        draft = honest(self, logits, position, drafted)
        if len(drafted) != flip_at[0]:
            return draft
        return DraftToken((draft.token + 1) % logits.shape[-1], draft.probs)

    patch.setattr(Sampler, "draft_token", flipping)
