"""What a round asks of a model, whatever computes it: the passes, and whom they tell of what.

Shapes: T rows of a pass, k drafted tokens, V vocabulary, D whatever a layer stores last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from moespeq.model.images import PlacedImage

__all__ = ["Choose", "GoesOn", "OnLayer", "OnStep", "Runner"]

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [1, V], step) -> the drafted token, int64 [1], on the logits' device and with no need to wait for it."""
GoesOn = Callable[[], bool]
"""Whether another token is to be drafted behind the one just chosen."""
OnStep = Callable[[int, Sequence[Sequence[int]]], None]
"""(step, the experts of each MoE layer): one draft step's routes are known."""
OnLayer = Callable[[int, Sequence[Sequence[int]]], None]
"""(MoE layer, the experts of each live row): the target's true routes of a layer are known."""


class Runner(Protocol):
    """The three passes. One sequence at a time, one engine thread."""

    model: PreTrainedModel
    context_tok: int
    rows: int
    device: torch.device

    @property
    def kv_bytes(self) -> int:
        """Bytes the key/value cache takes so far."""
        ...

    def kv_rows(self, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        """Of each layer, views of the keys and values at positions `begin` to `end`, [1, heads, T, D], to be copied
        from and to on the passes' stream; none before the first pass.
        """
        ...

    def max_k(self, position: int) -> int:
        """The longest draft a round at `position` may have."""
        ...

    @property
    def foresees(self) -> bool:
        """Whether `foresee` has something to say."""
        ...

    def foresee(self, tokens: Sequence[int], start: int, on_layer: OnLayer) -> None:
        """The draft's routes of a prompt's rows from `start` on, or of the first of them; `prefill` must follow."""
        ...

    def rotation_of(self, text_tok: int) -> int:
        """Which of the model's rotations turns the keys of a text of so many tokens; 0 where there is one alone."""
        ...

    def begin_text(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """All of a prompt, or of a text, before the first pass over rows of it."""
        ...

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
        """Rows `start`.. of the prompt; returns the logits of the last `num_logits` rows (0: of all), [n, V].

        images: those in these rows, each of them whole.

        on_ahead: hears what each layer but the first would do with the input of the layer before it, see OneLayerAhead.
        text_tok: of the whole text, whose rotation these rows take; by default it ends with them.
        """
        ...

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
        """`num_steps` draft steps from `token` at `position`; `choose` gives the first `num_chosen` steps' tokens, by
        default those of all but the last. `goes_on`, asked behind each chosen token but the last, may say that it was:
        then one step more tells its routes. A device waits for the host at each of these questions.

        `on_step` hears of every step in order, at the latest before this returns.
        """
        ...

    def verify(self, tokens: Sequence[int], position: int, on_layer: OnLayer | None) -> torch.Tensor:
        """The last committed token and the k drafted ones, from `position`; returns logits [k + 1, V]."""
        ...

    def can_resume(self, position: int) -> bool:
        """Whether a prefill may begin at `position` of the sequence there is; at 0 always."""
        ...

    def forget(self) -> None:
        """Clear keys and values, which a failed pass may have left as NaN: masked, they would still spoil a product."""
        ...
