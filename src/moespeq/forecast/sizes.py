"""Sizes of the store that a checkpoint would become, from its config and index alone: no weight is read.

Exact but for two things: residuals vary with the weights, so records are those of the bits that trained models needed,
rounded up; and without index or header the dense weights are those that the model class loads, all in bf16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moespeq.config import RecordForm
from moespeq.decode.planning import ModelSizes, tell_target
from moespeq.errors import CheckpointError
from moespeq.kernels.geometry import READ_AHEAD_BYTES
from moespeq.model.checkpoint_map import outline_model
from moespeq.model.loading import describe, load_config
from moespeq.model.scaled_tensors import MXFP4_DTYPE
from moespeq.nested import BaseFormat, Layout, base_record_bytes
from moespeq.plan import MemoryNeeds
from moespeq.prepare.layouts import CONVERTIBLE, EXPECTED_BITS, default_format, dtype_by_config, layouts_of
from moespeq.store import SafetensorsFile
from moespeq.store.checkpoint import INDEX_NAME, SINGLE_NAME
from moespeq.store.records import PAGE_BYTES, round_up, start_of_record
from moespeq.store.safetensors_file import MAX_HEADER_BYTES
from moespeq.store.untrusted import parse_json, read_regular
from moespeq.transfer import host_arena_bytes, plain_record_bytes, slot_stride_bytes
from moespeq.types import ExpertKey

__all__ = ["FEWER_BITS", "CheckpointSizes", "FewerBits"]

_BF16_BYTES = 2
_SOURCE_BITS = {"BF16": 16.0, "F16": 16.0, "F32": 32.0, "F8_E4M3": 8.0, MXFP4_DTYPE: 4.25}
_MOST_BYTES = 1 << 62
FEWER_BITS = 3
# Bits a weight of base and residual at 4 and at 3 bits with groups of 64, on trained models (docs/adr/0002).
_BASE_BITS, _RESIDUAL_BITS = (4.52, 3.52), (8.56, 9.09)


class CheckpointSizes:
    """Those of a checkpoint's folder, of which `config.json` is enough."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        layout: Layout,
        fmt: BaseFormat | None = None,
        convert_to: str | None = None,
    ) -> None:
        """layout: of bf16 experts. Raises UnsupportedModelError for fp32 that nobody asked to convert."""
        num_tensors, tensors_bytes = _tensors_of(folder)
        outline = outline_model(folder, num_tensors)
        fmt = fmt or default_format(folder)
        self.name, self.base_bits = name, fmt.bits
        dtype = dtype_by_config(folder)
        is_converted = convert_to is not None and dtype in CONVERTIBLE
        (self._layout,) = layouts_of(["BF16" if is_converted else dtype], layout)
        self._shapes = [(rows, cols) for _, rows, cols in outline.matrices]
        self._base_row_bytes = base_record_bytes(self._shapes, fmt)
        self.num_records = outline.num_moe_layers * outline.num_experts
        self._shape = describe(
            load_config(folder),
            num_moe_layers=outline.num_moe_layers,
            num_experts=outline.num_experts,
            top_k=outline.top_k,
            matrices=list(outline.matrices),
        )
        routed_bytes = int(_SOURCE_BITS[dtype] * self.num_records * self._shape.weights_per_expert / 8)
        if tensors_bytes is not None and tensors_bytes <= routed_bytes:
            raise CheckpointError(
                f"All tensors of {folder} have {tensors_bytes} bytes, its routed experts alone {routed_bytes} by "
                "config.json; check that index and config.json belong together."
            )
        loaded_bytes = _BF16_BYTES * outline.dense_weights
        stored_bytes = 0 if tensors_bytes is None else tensors_bytes - routed_bytes
        is_known = tensors_bytes is not None and dtype in ("BF16", "F16")
        self._dense_bytes = stored_bytes if is_known else max(loaded_bytes, stored_bytes)

    @property
    def is_plain(self) -> bool:
        return not self._layout.needs_base

    @property
    def target(self) -> str:
        return tell_target([self._layout], self.base_bits)

    @property
    def base_bytes(self) -> int:
        stride_bytes = start_of_record(self._base_row_bytes, self._base_row_bytes)
        return round_up((self.num_records - 1) * stride_bytes + self._base_row_bytes, PAGE_BYTES)

    def needs(self, records: RecordForm) -> MemoryNeeds:
        """As of a store, its records all alike."""
        plain_bytes = plain_record_bytes(self._shapes)
        residual_bytes = int(self._shape.weights_per_expert * EXPECTED_BITS[self._layout] / 8)
        record_bytes = plain_bytes if records == "plain" else residual_bytes
        if records in ("mixed", "whole") and not self.is_plain:
            record_bytes += self._base_row_bytes
        layers, experts = self._shape.num_moe_layers, self._shape.num_experts
        num_bytes = {ExpertKey(layer, expert): record_bytes for layer in range(layers) for expert in range(experts)}
        return MemoryNeeds(
            shape=self._shape,
            dense_bytes=self._dense_bytes,
            base_bytes=self.base_bytes,
            slot_bytes=slot_stride_bytes(record_bytes + READ_AHEAD_BYTES),
            num_records=self.num_records,
            records_bytes=host_arena_bytes(num_bytes),
            model=self.name,
            is_complete=self.is_plain,
        )


class FewerBits:
    """Sizes of the same model prepared with a base of 3 bits, reckoned from those with 4."""

    def __init__(self, sizes: ModelSizes) -> None:
        self._sizes = sizes
        assert sizes.base_bits == 4, sizes.base_bits
        self.name, self.is_plain, self.num_records = sizes.name, sizes.is_plain, sizes.num_records
        self.base_bits, self.target = FEWER_BITS, sizes.target

    @property
    def base_bytes(self) -> int:
        return int(self._sizes.base_bytes * _BASE_BITS[1] / _BASE_BITS[0])

    def needs(self, records: RecordForm) -> MemoryNeeds:
        needs = self._sizes.needs(records)
        growth = _RESIDUAL_BITS[1] / _RESIDUAL_BITS[0]
        if records in ("mixed", "whole"):
            growth = (_BASE_BITS[1] + _RESIDUAL_BITS[1]) / (_BASE_BITS[0] + _RESIDUAL_BITS[0])
        return replace(
            needs,
            base_bytes=self.base_bytes,
            slot_bytes=slot_stride_bytes(int(needs.slot_bytes * growth)),
            records_bytes=int(needs.records_bytes * growth),
        )


def _tensors_of(folder: Path) -> tuple[int | None, int | None]:
    """(number, bytes) of all tensors, by a single file's header or the index; None where neither says.

    Raises CheckpointError.
    """
    if (folder / SINGLE_NAME).is_file():
        entries = SafetensorsFile.open(folder / SINGLE_NAME).entries
        return len(entries), sum(entry.num_bytes for entry in entries)
    try:
        fields = parse_json(read_regular(folder / INDEX_NAME, MAX_HEADER_BYTES))
        names, total = fields["weight_map"], fields["metadata"]["total_size"]
    except (OSError, ValueError, LookupError, TypeError):
        return None, None
    num_tensors = len(names) if isinstance(names, dict) else None
    if not isinstance(total, (int, float)):
        return num_tensors, None
    if not total <= _MOST_BYTES:
        raise CheckpointError(f"{folder / INDEX_NAME} gives a total_size that no checkpoint has; download it again.")
    return num_tensors, int(total)
