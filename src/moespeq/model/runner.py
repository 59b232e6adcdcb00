"""The passes of a round over one model and one cache: prefill, draft step, verify.

Shapes: T rows of a pass, R row bucket, B length bucket, V vocabulary.

All passes run transformers' unmodified forward with ready masks and places. What makes verify exact for every k: it
always has R rows, its length bucket depends on the position only, and a row's result does not depend on the others.
Padded rows (past the k + 1 live ones) repeat the last live token and see what it sees; they write past the live end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from moespeq.buckets import LengthBuckets
from moespeq.model.experts import Experts, ExpertsSwitch, tag
from moespeq.model.kv_cache import SharedCache
from moespeq.model.masks import MaskBuilder
from moespeq.model.quantizer import experts_modules

__all__ = ["Runner"]


class Runner:
    """Runs passes; holds the model, the one cache and the length buckets. Not thread-safe: one engine thread."""

    def __init__(self, model: PreTrainedModel, *, context_tok: int, rows: int) -> None:
        config = model.config.get_text_config()
        self.model, self.context_tok, self.rows = model, context_tok, rows
        self.device: torch.device = model.device
        self.buckets = LengthBuckets(context_tok, _rope_switch_lengths(config))
        length_tok = self.buckets.storage_tok(context_tok, rows)
        self._cache = SharedCache(config.num_hidden_layers, length_tok, self.device)
        self._masks = MaskBuilder(config, model.dtype, self.device)
        self._switch = ExpertsSwitch()
        tag([module for _, module in experts_modules(model)], self._switch)

    @property
    def kv_bytes(self) -> int:
        """Bytes the key/value cache takes so far."""
        return self._cache.num_bytes

    def prefill(self, tokens: Sequence[int], start: int, experts: Experts, *, num_logits: int) -> torch.Tensor:
        """Rows `start`.. of the prompt; returns the logits of the last `num_logits` rows (0: of all), [n, V]."""
        places = torch.arange(start, start + len(tokens), device=self.device)
        return self._forward(list(tokens), start, places, experts, num_logits=num_logits)

    def draft_step(self, token: int, position: int, bucket: int, experts: Experts) -> torch.Tensor:
        """One row of the draft, whose round looks over `bucket` positions; returns logits [1, V]."""
        places = torch.tensor([position], device=self.device)
        return self._forward([token], position, places, experts, bucket=bucket)

    def verify(self, tokens: Sequence[int], position: int, experts: Experts) -> torch.Tensor:
        """The last committed token and the k drafted ones, from `position`; returns logits [k + 1, V]."""
        live, last = len(tokens), position + len(tokens) - 1
        assert live <= self.rows
        padded = [*tokens, *[tokens[-1]] * (self.rows - live)]
        places = torch.arange(position, position + self.rows, device=self.device).clamp_(max=last)
        return self._forward(padded, position, places, experts)[:live]

    def max_k(self, position: int) -> int:
        """The longest draft a round at `position` may have: rows, the context and the length bucket bound it."""
        return min(self.rows, self.buckets.above(position) - position, self.context_tok - position) - 1

    def _forward(
        self,
        tokens: list[int],
        start: int,
        places: torch.Tensor,
        experts: Experts,
        *,
        bucket: int | None = None,
        num_logits: int = 0,
    ) -> torch.Tensor:
        """`places` [T]: each row's position, for rotary embedding and mask; rows are written at start..start+T-1."""
        if bucket is None:
            bucket = self.buckets.above(int(places[-1]))
        self._cache.cursor.move(start, len(tokens), bucket)
        self._switch.active = experts
        try:
            with torch.inference_mode():
                output = self.model(
                    input_ids=torch.tensor([tokens], device=self.device),
                    position_ids=places[None],
                    attention_mask=self._masks.build(places, bucket),
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=num_logits,
                )
        finally:
            self._switch.active = None
        logits: torch.Tensor = output.logits[0]
        return logits


def _rope_switch_lengths(config: PreTrainedConfig) -> list[int]:
    """Lengths at which the rotary embedding itself changes (long-rope has two sets of factors)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return [int(original)] if original and parameters.get("rope_type") in ("longrope", "dynamic") else []
