"""A model's weights in one allocation on the device, so that they take the bytes the plan counts.

One by one they would take whole segments of torch's allocator, which are 20 MiB for every two matrices of 8.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["move_in_one_piece"]

_ALIGN_BYTES = 256  # as the allocator's own; matrix products are fastest from such addresses


def move_in_one_piece(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model with all parameters and buffers on `device`, views of one allocation; what is tied stays tied."""
    own = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    piece = torch.empty(sum(map(_taken_bytes, own.values())), dtype=torch.uint8, device=device)
    end = 0

    def move(tensor: Tensor) -> Tensor:
        nonlocal end
        if tensor.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr():
            return tensor  # tied, and moved with the other name
        begin, end = end, end + _taken_bytes(tensor)
        place = piece[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)

    model._apply(move)
    return model


def _taken_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
