"""The passes of a round over one model and one cache: prefill, draft, verify.

Shapes: T rows of a pass, R row bucket, B length bucket, V vocabulary.

All passes run transformers' unmodified forward with ready masks and places. What makes verify exact for every k: it
always has R rows, its length bucket depends on the position only, and a row's result does not depend on the others.
Padded rows (past the k + 1 live ones) repeat the last live token and see what it sees; they write past the live end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from moespeq.buckets import LengthBuckets
from moespeq.kernels import ExpertMath
from moespeq.model.caches import new_cache
from moespeq.model.experts import DraftExperts, Experts, ExpertsSwitch, TargetExperts, tag
from moespeq.model.families import FAMILIES
from moespeq.model.images import PlacedImage
from moespeq.model.masks import MaskBuilder
from moespeq.model.one_layer_ahead import OneLayerAhead
from moespeq.model.one_stream import OneStream
from moespeq.model.passes import Choose, GoesOn, OnLayer, OnStep
from moespeq.model.quantizer import experts_modules
from moespeq.model.recurrent import RecurrentStates
from moespeq.model.rotation import rope_switch_lengths
from moespeq.model.row_positions import RowPositions
from moespeq.model.vision import sees_whole_images

__all__ = ["ROW_TILE", "EagerRunner", "max_k"]

ROW_TILE = 16  # rows of every expert product in verify; a one-row engine (on_demand) multiplies one


class EagerRunner:
    """Passes run layer by layer as torch runs them; every device, every model."""

    def __init__(
        self, model: PreTrainedModel, *, context_tok: int, rows: int, draft: DraftExperts, target: TargetExperts
    ) -> None:
        config = model.config.get_text_config()
        self.model, self.context_tok, self.rows = model, context_tok, rows
        self.device: torch.device = model.device
        self._switch_lengths = rope_switch_lengths(config)
        self.buckets = LengthBuckets(context_tok, self._switch_lengths)
        self._draft, self._target = draft, target
        self._stream = OneStream(self.device)
        length_tok = self.buckets.storage_tok(context_tok, rows)
        self._states = RecurrentStates(rows, continues=FAMILIES[config.model_type].continues)
        self._cache = new_cache(model, length_tok, self.device, self._states)
        self._masks = MaskBuilder(config, model.dtype, self.device)
        self._positions, self._sees_whole_images = RowPositions(model), sees_whole_images(model.config)
        self._switch = ExpertsSwitch()
        tag([module for _, module in experts_modules(model)], self._switch)

    @property
    def kv_bytes(self) -> int:
        """Bytes the key/value cache takes so far."""
        return self._cache.num_bytes + self._states.num_bytes

    def kv_rows(self, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        self._stream.check()
        return self._cache.rows(begin, end)

    def forget(self) -> None:
        self._cache.clear()
        self._states.clear()

    def can_resume(self, position: int) -> bool:
        return self._states.has(position)

    def max_k(self, position: int) -> int:
        return max_k(position, self.rows, self.buckets, self.context_tok)

    @property
    def foresees(self) -> bool:
        return False  # here a draft of many rows takes as long as the link it would feed

    def foresee(self, tokens: Sequence[int], start: int, on_layer: OnLayer) -> None:
        pass

    def rotation_of(self, text_tok: int) -> int:
        return sum(length < text_tok for length in self._switch_lengths)

    def begin_text(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> None:
        self._positions.begin(tokens, images)

    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        *,
        num_logits: int,
        images: Sequence[PlacedImage] = (),
        on_ahead: OnLayer | None = None,
        text_tok: int | None = None,
    ) -> torch.Tensor:
        self._stream.check()
        self._target.expect(live_rows=len(tokens), row_tile=None, on_layer=None)
        self._states.begin_target(start, len(tokens), by_row=False)
        end = start + len(tokens)
        bucket, places = self.buckets.above(end - 1), torch.arange(start, end, device=self.device)
        ids = torch.tensor(tokens, device=self.device)
        experts = self._target if on_ahead is None else self._heard(on_ahead)
        if text_tok is None or self.rotation_of(text_tok) == self.rotation_of(end):
            return self._forward(ids, start, places, experts, bucket=bucket, num_logits=num_logits, images=images)
        assert not images, "a model that changes its rotation takes none"
        # The model chooses by the last position of a pass: a padded row has the text's.
        ids, places = torch.cat([ids, ids[-1:]]), torch.cat([places, places.new_tensor([text_tok - 1])])
        num_logits = num_logits + 1 if num_logits else 0
        return self._forward(ids, start, places, experts, bucket=bucket, num_logits=num_logits)[:-1]

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
        self._stream.check()
        num_chosen = num_steps - 1 if num_chosen is None else num_chosen
        ids, bucket = torch.tensor([token], device=self.device), self.buckets.above(position)
        step = 0
        while step < num_steps:
            places = torch.tensor([position + step], device=self.device)
            self._states.begin_draft(position + step)
            logits = self._forward(ids, position + step, places, self._draft, bucket=bucket)
            on_step(step, self._draft.take_routes())
            if step < num_chosen:
                ids = choose(logits, step)
                if goes_on is not None and step + 1 < num_chosen and not goes_on():
                    num_steps, num_chosen = step + 2, step + 1
            step += 1

    def verify(self, tokens: Sequence[int], position: int, on_layer: OnLayer | None) -> torch.Tensor:
        self._stream.check()
        live, last = len(tokens), position + len(tokens) - 1
        assert live <= self.rows
        self._target.expect(live_rows=live, row_tile=ROW_TILE if self.rows > 1 else 1, on_layer=on_layer)
        self._states.begin_target(position, live, by_row=True)
        ids = torch.tensor([*tokens, *[tokens[-1]] * (self.rows - live)], device=self.device)
        places = torch.arange(position, position + self.rows, device=self.device).clamp_(max=last)
        return self._forward(ids, position, places, self._target)[:live]

    def _forward(
        self,
        ids: torch.Tensor,
        start: int,
        places: torch.Tensor,
        experts: Experts,
        *,
        bucket: int | None = None,
        num_logits: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> torch.Tensor:
        """`ids`, `places` [T]: each row's token and position; rows are written at start..start+T-1."""
        if bucket is None:
            bucket = self.buckets.above(int(places[-1]))
        self._cache.cursor.move(start, len(ids), bucket)
        with self._switch.using(experts), torch.inference_mode():
            output = self.model(
                input_ids=ids[None],
                position_ids=self._positions.of(places),
                attention_mask=self._masks.build(places, bucket, ahead=self._ahead(places, start, images)),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=num_logits,
                **self._pixels(images),
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _pixels(self, images: Sequence[PlacedImage]) -> dict[str, torch.Tensor]:
        """What the forward takes of `images`, by its names."""
        names = images[0].image.inputs if images else ()
        return {name: torch.cat([one.image.inputs[name] for one in images]).to(self.device) for name in names}

    def _ahead(self, places: torch.Tensor, start: int, images: Sequence[PlacedImage]) -> torch.Tensor | None:
        """[T]: how far each row sees in layers with a window, where those of an image see all of it."""
        if not (images and self._sees_whole_images):
            return None
        ahead = places.clone()
        for placed in images:
            ahead[placed.begin - start : placed.end - start] = placed.end - 1
        return ahead

    def _heard(self, on_ahead: OnLayer) -> Experts:
        """The target's experts, their inputs heard."""
        ahead, target = OneLayerAhead(self.model, self._switch.using, on_ahead), self._target

        def experts(
            layer: int, math: ExpertMath, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            ahead.hear_input(layer, hidden)
            return target(layer, math, hidden, routes, weights)

        return experts


def max_k(position: int, rows: int, buckets: LengthBuckets, context_tok: int) -> int:
    """The longest draft of a round at `position`: rows, the context and the length bucket bound it."""
    return min(rows, buckets.above(position) - position, context_tok - position) - 1
