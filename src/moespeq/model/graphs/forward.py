"""One forward of transformers' model over static storage, with ready masks and places."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moespeq.model.graphs.attention import PassThroughCache
from moespeq.model.graphs.operators import running
from moespeq.model.graphs.static_pass import LayerExperts, StaticPass
from moespeq.model.masks import MaskBuilder

__all__ = ["Forward"]


class Forward:
    """Calls the model. `columns` fixes the width of the masks, None makes it the bucket of each call.

    Compiled layers see one mask width for all buckets; a prefill, which is not compiled, takes the narrow one.
    """

    def __init__(self, model: PreTrainedModel, static_pass: StaticPass, *, columns: int | None) -> None:
        self._model, self._pass, self._columns = model, static_pass, columns
        self._masks = MaskBuilder(model.config.get_text_config(), model.dtype, model.device)
        self._cache = PassThroughCache()

    def __call__(
        self,
        ids: Tensor,
        places: Tensor,
        written: Tensor,
        bucket: int,
        experts: LayerExperts,
        *,
        num_logits: int | Tensor = 0,
        end: int | None = None,
    ) -> Tensor:
        """ids, places (seen), written: int64 [T] -> logits of the last `num_logits` rows (0: of all), [n, V],
        or of the rows that it names.

        end: the position behind the last row, where the rows follow each other and each sees all up to its own.
        """
        masks = self._masks.build(places, self._columns or bucket)
        causal = () if end is None else self._masks.hide_only_what_follows(masks, end)
        self._pass.begin(written, bucket, experts, causal_masks=causal, end=end)
        try:
            with torch.inference_mode(), running(self._pass):
                output = self._model(
                    input_ids=ids[None],
                    position_ids=places[None],
                    attention_mask=masks,
                    past_key_values=self._cache,
                    use_cache=True,
                    logits_to_keep=num_logits,
                )
        finally:
            self._pass.end()
        logits: Tensor = output.logits[0]
        return logits
