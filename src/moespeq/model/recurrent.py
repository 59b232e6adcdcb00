"""Mixers with a state, instead of keys and values or beside them (linear attention, convolutions), row by row.

Such a mixer takes another kernel for one row than for several, whose bits differ, and cannot be cut back: padded or
rejected rows would stay in its state. So draft and verify give it one row at a time, live rows only; the target's
state behind every row is kept until the next pass of the target, and each pass begins with the one of its first
position. A prefill chunk takes the model's own kernel. Nothing is replayed, and a row's bits depend on the rows before
it and on R alone.

Owns the states. Shapes: R row bucket, H hidden size; a state of a layer is one or more tensors of any shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from moespeq.model.families import FAMILIES
from moespeq.model.row_projections import RowProjections

__all__ = ["RecurrentStates", "StateLayer", "wrap_mixers"]


class RecurrentStates:
    """Which states there are: the target's behind the last positions, and the running one of every layer.

    The state of position p is the one that tokens 0..p-1 leave. Those of R + 1 positions in a row are kept, in a ring.
    """

    def __init__(self, rows: int, *, continues: bool = True) -> None:
        """continues: whether the model's own code may be given several rows behind others."""
        self._num_kept, self._continues = rows + 1, continues
        self._kept: dict[int, int] = {}  # place in the ring -> position
        self._layers: list[StateLayer] = []
        self._start = 0
        self._draft_end: int | None = None  # where the draft's running state stands
        self.live_rows: int | None = None  # of the running pass, one by one; None: all at once, as the model has it
        self._is_draft = False

    def __bool__(self) -> bool:
        """Whether the model has such mixers."""
        return bool(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes taken so far; a layer's are allocated by its first pass."""
        return sum(layer.num_bytes for layer in self._layers)

    @property
    def bytes_of_one(self) -> int:
        """Bytes of one position's state, all layers; after a pass."""
        return sum(layer.bytes_of_one for layer in self._layers)

    def new_layer(self) -> StateLayer:
        """A cache layer of these states."""
        self._layers.append(StateLayer(self._num_kept))
        return self._layers[-1]

    def has(self, position: int) -> bool:
        """Whether a pass of the target may begin at `position`."""
        return not self._layers or position == 0 or self._kept.get(position % self._num_kept) == position

    def begin_target(self, start: int, num_rows: int, *, by_row: bool) -> None:
        """The next pass is the target's, `num_rows` live rows from position `start` on; `has(start)`."""
        assert self.has(start), (start, self._kept)
        by_row = by_row or (start > 0 and not self._continues)
        self._start, self.live_rows, self._is_draft = start, num_rows if by_row else None, False
        self._draft_end = None
        ends = range(start + 1, start + num_rows + 1) if by_row else (start + num_rows,)
        self._kept = {place: position for place, position in self._kept.items() if position == start}
        self._kept.update({end % self._num_kept: end for end in ends})
        self._load(start)

    def begin_draft(self, start: int) -> None:
        """The next pass is a draft step at position `start`: behind the last one, or where a round begins."""
        self._start, self.live_rows, self._is_draft = start, 1, True
        if self._draft_end != start:
            self._load(start)
        self._draft_end = start + 1

    def keep(self, layer: StateLayer, num_rows: int) -> None:
        """The layer's running state is that behind `num_rows` rows of the pass."""
        if not self._is_draft:
            layer.save((self._start + num_rows) % self._num_kept)

    def clear(self) -> None:
        """As at first: only position 0 has a state."""
        self._kept, self._draft_end = {}, None
        self._load(0)

    @torch.inference_mode()
    def _load(self, position: int) -> None:
        for layer in self._layers:
            if position == 0:
                layer.reset()
            else:
                layer.load(position % self._num_kept)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """transformers' own layer holds the running state; beside it the ring of those that are kept.

    keys_beside: holds the keys and values of a layer that has both.
    """

    keys_beside: CacheLayerMixin

    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self._num_kept = num_kept
        self._ring: list[torch.Tensor] = []  # [R + 1, ...], in the order of `_running`

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring and the running state."""
        return self.bytes_of_one + sum(ring.nbytes for ring in self._ring)

    @property
    def bytes_of_one(self) -> int:
        """Bytes of the running state."""
        return sum(tensor.nbytes for tensor in self._running())

    def save(self, place: int) -> None:
        """Keep the running state."""
        running = list(self._running())
        if not self._ring:
            self._ring = [tensor.new_empty((self._num_kept, *tensor.shape)) for tensor in running]
        for ring, tensor in zip(self._ring, running, strict=True):
            ring[place].copy_(tensor)

    def load(self, place: int) -> None:
        """Make a kept state the running one."""
        for ring, tensor in zip(self._ring, self._running(), strict=True):
            tensor.copy_(ring[place])

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, where the layer has them too."""
        updated: tuple[torch.Tensor, torch.Tensor] = self.keys_beside.update(*args, **kwargs)
        return updated

    def get_seq_length(self) -> int:
        return 0  # positions are given with every pass

    def _running(self) -> Iterator[torch.Tensor]:
        for states in (self.conv_states, self.recurrent_states):
            yield from (state for state in states.values() if state is not None)


class _RowByRow(nn.Module):
    """A mixer of the model, given one row at a time where the pass says so."""

    def __init__(self, mixer: nn.Module, states: RecurrentStates, layer: StateLayer) -> None:
        super().__init__()
        self.mixer = mixer
        self._states, self._layer = states, layer
        self._projections = RowProjections(mixer)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, T, H] to [1, T, H], or to several of them; rows behind the live ones repeat the last."""
        live = self._states.live_rows
        if live is None:
            mixed = self.mixer(hidden_states, *args, **kwargs)
            self._states.keep(self._layer, hidden_states.shape[1])
            return mixed

        def mix_row(row: int, hidden: torch.Tensor) -> Any:
            mixed = self.mixer(hidden, *args, **kwargs)
            self._states.keep(self._layer, row + 1)
            return mixed

        return self._projections.mix_rows(hidden_states, live, mix_row)


def wrap_mixers(model: PreTrainedModel, states: RecurrentStates) -> dict[int, StateLayer]:
    """Put every recurrent mixer of `model` behind one of ours; returns their cache layers by layer index."""
    layers: dict[int, StateLayer] = {}
    mixer_class = FAMILIES[model.config.get_text_config().model_type].mixer
    if mixer_class is None:
        return layers
    for parent in list(model.modules()):
        for name, mixer in list(parent.named_children()):
            if type(mixer).__name__ == mixer_class:
                layer = layers[mixer.layer_idx] = states.new_layer()
                setattr(parent, name, _RowByRow(mixer, states, layer))
    return layers
