"""Whether a store's base and records are what its checkpoint's weights give, for some experts of every part of it.

Three questions: are the bytes those that were written (checksums), does quantizing the exact weights again give the
base that is there (its calibration), and are the exact weights the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moespeq.errors import StorageError, StoreError
from moespeq.nested import Base, dequantize_base, encode_base, pack_base, split_base
from moespeq.prepare.conversion import as_prepared
from moespeq.prepare.experts import ExpertReader, are_equal, decode_expert, stored_parts, view_of
from moespeq.store import Store, open_checkpoint
from moespeq.transfer import spread
from moespeq.types import ExpertKey

__all__ = ["BaseFacts", "probe_base"]

_NUM_EXPERTS = 16


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """Of `num_experts` looked at: sentences of those that are damaged, how many bases come out otherwise when their
    weights are quantized again, how many weights are not the checkpoint's (None: it was not at hand). error_share: of
    the weights' norm, that the base leaves to the residual.
    """

    num_experts: int
    bits: int
    damaged: tuple[str, ...]
    num_recoded: int
    num_unlike_checkpoint: int | None
    error_share: float


def probe_base(store_path: Path, checkpoint: Path | None, num_experts: int = _NUM_EXPERTS) -> BaseFacts:
    """Look at experts spread over the store's layers."""
    with Store.open(store_path) as store:
        reader = None
        if checkpoint is not None:
            seen = as_prepared(open_checkpoint(checkpoint), store)
            reader = ExpertReader(seen, store.pieces(), store.manifest.matrices)
        keys, damaged = spread(list(store.keys()), num_experts), []
        num_recoded = num_unlike = 0
        error_squares = weight_squares = 0.0
        for key in keys:
            try:
                exact, stored = decode_expert(store, key), _stored_base(store, key)
            except (StoreError, StorageError) as error:
                damaged.append(str(error))
                continue
            num_recoded += not torch.equal(_recoded(store, exact), stored)
            num_unlike += reader is not None and not are_equal(stored_parts(store, key), reader.read_parts(key))
            for weight, base in zip(exact, _bases(store, stored), strict=True):
                wide = weight.double()
                centre = dequantize_base(base, (weight.shape[0], weight.shape[1]), store.manifest.base_format)
                error_squares += float((centre.double() - wide).square().sum())
                weight_squares += float(wide.square().sum())
        return BaseFacts(
            num_experts=len(keys),
            bits=store.manifest.base_format.bits,
            damaged=tuple(damaged),
            num_recoded=num_recoded,
            num_unlike_checkpoint=None if reader is None else num_unlike,
            error_share=(error_squares / weight_squares) ** 0.5 if weight_squares else 0.0,
        )


def _stored_base(store: Store, key: ExpertKey) -> Tensor:
    base = torch.empty(store.base_bytes(key), dtype=torch.uint8)
    store.read_base_into(key, view_of(base), verify=True)
    return base


def _bases(store: Store, stored: Tensor) -> list[Base]:
    return split_base(stored, store.manifest.shapes, store.manifest.base_format)


def _recoded(store: Store, exact: list[Tensor]) -> Tensor:
    return pack_base([encode_base(weight, store.manifest.base_format) for weight in exact])
