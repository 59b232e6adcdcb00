"""The Runner of a CUDA device: drafts, verifies and prefills short prompts by graphs, long ones eagerly, all over one
static cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moespeq.buckets import PROMPT_ROWS, LengthBuckets
from moespeq.model.graphs import operators
from moespeq.model.graphs.attention import KVStorage, attention_of_any_shape
from moespeq.model.graphs.capture import GraphPool
from moespeq.model.graphs.compiled import compile_layers, eager_layers
from moespeq.model.graphs.draft_graph import DraftGraphs
from moespeq.model.graphs.forward import Forward
from moespeq.model.graphs.prefill_experts import PrefillExperts
from moespeq.model.graphs.prompt_draft import PromptDraft
from moespeq.model.graphs.prompt_pieces import PromptPieces
from moespeq.model.graphs.static_pass import LayerExperts, StaticPass
from moespeq.model.graphs.verify_pieces import VerifyPieces
from moespeq.model.graphs.wave_products import WaveProducts
from moespeq.model.images import PlacedImage
from moespeq.model.one_layer_ahead import OneLayerAhead
from moespeq.model.one_stream import OneStream
from moespeq.model.passes import Choose, GoesOn, OnLayer, OnStep
from moespeq.model.runner import max_k

__all__ = ["GraphRunner"]

_CAPTURED_AT_LOAD_TOK = 4096  # half a second a bucket, better spent there than in the middle of an answer
_MASK_ALIGN_TOK = 64  # attention kernels want rows of a mask to begin on 16 bytes


class GraphRunner:
    """See Runner. `warm_up` compiles, allocates and captures the graphs of usual lengths; those of a longer bucket are
    captured when it is first reached.

    draft: the draft's experts, None for an engine that never drafts; products: a verified layer's; prefill: a prompt's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: GraphPool,
        *,
        context_tok: int,
        rows: int,
        num_layers: int,
        top_k: int,
        draft: LayerExperts | None,
        products: WaveProducts,
        prefill: PrefillExperts,
    ) -> None:
        config = model.config.get_text_config()
        self.model, self.context_tok, self.rows = model, context_tok, rows
        self.device: torch.device = model.device
        self.buckets = LengthBuckets(context_tok)
        length_tok = -(-self.buckets.storage_tok(context_tok, rows) // _MASK_ALIGN_TOK) * _MASK_ALIGN_TOK
        self._storage = KVStorage(length_tok)
        self._products, self._prefill = products, prefill
        self._stream = OneStream(self.device)
        static_pass = StaticPass(self._storage)
        self._eager = Forward(model, static_pass, columns=None)
        fixed = Forward(model, static_pass, columns=length_tok)
        self._verify = VerifyPieces(
            fixed,
            pool,
            products,
            rows=rows,
            top_k=top_k,
            hidden_size=config.hidden_size,
            dtype=model.dtype,
            device=self.device,
        )
        self._draft = draft and DraftGraphs(
            fixed, pool, draft, num_layers=num_layers, top_k=top_k, max_steps=rows, device=self.device
        )
        self._prompt_draft = draft and PromptDraft(
            fixed,
            pool,
            draft,
            num_layers=num_layers,
            top_k=top_k,
            spare_place=context_tok,
            device=self.device,
        )
        self._prompt = PromptPieces(
            lambda bucket: Forward(model, static_pass, columns=bucket),
            pool,
            {rows: self.buckets.above(rows - 1) for rows in PROMPT_ROWS if rows <= context_tok},
            spare_place=context_tok,
            device=self.device,
        )

    @property
    def kv_bytes(self) -> int:
        return self._storage.num_bytes

    def kv_rows(self, begin: int, end: int) -> list[tuple[Tensor, ...]]:
        self._stream.check()
        return self._storage.rows(begin, end)

    @property
    def facts(self) -> Mapping[str, str]:
        """How the passes run, for people."""
        return {
            "draft": "one CUDA graph a step" if self._draft else "none",
            "verify": f"CUDA graphs of {self.rows} rows, cut at the experts",
            "prefill": f"CUDA graphs of up to {PROMPT_ROWS[-1]} rows, cut at the experts; eager above",
        }

    def warm_up(self) -> None:
        """Compile the layers for one row and for R rows, allocate the cache, capture; no sequence has begun."""
        compile_layers(self.model)
        first, *longer = self.buckets.up_to(_CAPTURED_AT_LOAD_TOK)
        self._verify.warm_up(self.context_tok, first)
        if self._draft:
            self._draft.warm_up(0, first)  # inside the bucket; the first prompt writes this place again
        for bucket in (first, *longer):
            self._verify.capture(bucket)
            if self._draft and self._prompt_draft:
                self._draft.capture(bucket)
                self._prompt_draft.capture(bucket)
        self._prefill.warm_up()
        self._prompt.capture()

    def can_resume(self, position: int) -> bool:
        return True  # models with states, which cannot, run eagerly

    def forget(self) -> None:
        """Clear keys and values, which a failed pass may have left as NaN: masked, they would still spoil a product."""
        self._storage.clear()
        self._verify.clear()

    def max_k(self, position: int) -> int:
        return max_k(position, self.rows, self.buckets, self.context_tok)

    @property
    def foresees(self) -> bool:
        return self._prompt_draft is not None

    def foresee(self, tokens: Sequence[int], start: int, on_layer: OnLayer) -> None:
        self._stream.check()
        if self._prompt_draft:
            self._prompt_draft.run(tokens, start, self.buckets.above(start + len(tokens) - 1), on_layer)

    def rotation_of(self, text_tok: int) -> int:
        return 0  # a model that changes it runs eagerly

    def begin_text(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> None:
        assert not images, "a model that takes images runs eagerly"

    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        num_logits: int,
        images: Sequence[PlacedImage] = (),
        on_ahead: OnLayer | None = None,
        text_tok: int | None = None,
    ) -> Tensor:
        self._stream.check()
        if num_logits == 1 and on_ahead is None and self._prompt.fits(len(tokens), start):
            return self._prompt.run(tokens, self._prefill.of(len(tokens)))
        ids = torch.tensor(tokens, device=self.device)
        places = torch.arange(start, start + len(tokens), device=self.device)
        bucket = self.buckets.above(start + len(tokens) - 1)
        with eager_layers(), attention_of_any_shape():
            experts, end = self._prefill.of(len(tokens)), start + len(tokens)
            if on_ahead is not None:
                experts = _heard(experts, OneLayerAhead(self.model, operators.running, on_ahead))
            return self._eager(ids, places, places, bucket, experts, num_logits=num_logits, end=end)

    def draft(
        self,
        token: int,
        position: int,
        num_steps: int,
        choose: Choose,
        on_step: OnStep,
        *,
        num_chosen: int | None = None,
        goes_on: GoesOn | None = None,
    ) -> None:
        assert self._draft is not None, "this engine was loaded without a draft"
        self._stream.check()
        num_chosen = num_steps - 1 if num_chosen is None else num_chosen
        self._draft.draft(
            token,
            position,
            self.buckets.above(position),
            num_steps,
            choose,
            on_step,
            num_chosen=num_chosen,
            goes_on=goes_on,
        )

    def verify(self, tokens: Sequence[int], position: int, on_layer: OnLayer | None) -> Tensor:
        self._stream.check()
        self._products.on_layer = on_layer
        bucket = self.buckets.above(position + len(tokens) - 1)
        return self._verify.verify(tokens, position, bucket)


def _heard(experts: LayerExperts, ahead: OneLayerAhead) -> LayerExperts:
    """The same experts, their inputs heard."""

    def heard(layer: int, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        ahead.hear_input(layer, hidden)
        return experts(layer, hidden, routes, weights)

    return heard
