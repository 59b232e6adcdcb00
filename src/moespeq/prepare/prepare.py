"""Checkpoint to store, in one streaming pass.

Order: dense tensors, then experts layer by layer, then the small files, the manifest, the rename. A few
experts are in memory at a time; what is done survives a kill and is not done again. A layer whose residuals
would be larger than 12 bits a weight is written again as plain records: then plain is the better record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from moespeq import __version__
from moespeq.errors import CheckpointError, StoreError, StoreInUseError, UsageError
from moespeq.model.checkpoint_map import CheckpointMap, map_checkpoint
from moespeq.nested import BaseFormat, Layout, residual_bits
from moespeq.prepare.conversion import with_bf16_experts
from moespeq.prepare.encoder import ExpertEncoder, default_layout
from moespeq.prepare.experts import ExpertReader, view_of
from moespeq.prepare.hashing import CHUNK_BYTES, SourceHasher
from moespeq.prepare.layouts import check_base, default_format, layouts_of
from moespeq.prepare.needed_space import expected_bytes, share_bytes
from moespeq.prepare.source import cache_folder_for, default_output, is_store, name_of, resolve_source
from moespeq.prepare.workers import ExpertWorkers
from moespeq.progress import Meter, ProgressSink
from moespeq.store import (
    Checkpoint,
    Manifest,
    SafetensorsFile,
    SourceFile,
    StoreWriter,
    TensorEntry,
    open_checkpoint,
)
from moespeq.store.checkpoint import INDEX_NAME, is_weights_name
from moespeq.store.elsewhere import require_separate
from moespeq.store.manifest import SCHEMA
from moespeq.store.output_path import require_new_name
from moespeq.store.pieces import pack_pieces
from moespeq.store.safetensors_file import build_header
from moespeq.types import ExpertKey

__all__ = ["prepare_cached", "prepare_store", "write_store"]

MAX_RESIDUAL_BITS = 12.0
_LOOK_EVERY_S = 0.5  # whether another process is done
COMMIT_BYTES = 256 << 20


def prepare_store(
    source: Path | str,
    out: Path | None = None,
    *,
    layout: Layout | None = None,
    fmt: BaseFormat | None = None,
    device: str = "auto",
    convert_to: Literal["bf16"] | None = None,
    elsewhere: Sequence[Path] = (),
    progress: ProgressSink | None = None,
) -> Path:
    """Turn a checkpoint folder or hub id into a store at `out` (default `./NAME.moespeq`); returns its path.

    device: where experts are encoded, by default a GPU where there is one; the bytes are the same. layout: of bf16
    experts, by default the faster one on such a device (see `default_layout`). convert_to: rounds fp32 and fp16 experts
    to it, with a warning. elsewhere: folders on other disks; the layers' expert records are dealt to them and to `out`
    in turn. Goes on where an interrupted run for the same checkpoint and options stopped. Raises CheckpointError,
    UnsupportedModelError, StoreError (it exists, or another process prepares it) or StorageError (no space).
    """
    folder = resolve_source(source)
    out = out if out is not None else default_output(source)
    require_new_name(out)
    if out.resolve() == folder.resolve():
        raise UsageError(f"{out} is the checkpoint itself; choose another output.")
    checkpoint = open_checkpoint(folder)
    if convert_to is not None:
        checkpoint = with_bf16_experts(checkpoint)
    with SourceHasher(checkpoint.files) as hasher:
        return write_store(
            checkpoint,
            out,
            name=name_of(source),
            digests=hasher.wait,
            layout=layout or default_layout(device),
            fmt=fmt,
            device=device,
            elsewhere=elsewhere,
            progress=progress,
        )


def write_store(
    checkpoint: Checkpoint,
    out: Path,
    *,
    name: str,
    digests: Callable[[], Sequence[str]],
    layout: Layout = Layout.FIXED,
    fmt: BaseFormat | None = None,
    device: str = "auto",
    elsewhere: Sequence[Path] = (),
    progress: ProgressSink | None = None,
) -> Path:
    """The store of an open checkpoint, whose tensors may come from anywhere that its files can read.

    digests: SHA-256 of the files in hexadecimal, asked for at the end. Raises as `prepare_store`.
    """
    mapped = map_checkpoint(checkpoint)
    fmt, layouts = fmt or default_format(checkpoint.folder), layouts_of(mapped.dtypes, layout)
    check_base(layouts, fmt)
    require_separate(out, elsewhere)
    num_layers = len(mapped.module_names)
    if len(elsewhere) >= num_layers:
        raise UsageError(f"{num_layers} MoE layers cannot be dealt to {len(elsewhere)} more folders; give fewer.")
    identity = {
        "moespeq": __version__,
        "schema": SCHEMA,
        "checkpoint": checkpoint.fingerprint(),
        "base_format": fmt.to_json(),
        "layout": layout.value,
        "elsewhere": [str(folder.resolve()) for folder in elsewhere],
    }
    other_bytes, records_bytes = expected_bytes(checkpoint, mapped, fmt, layouts)
    most_records_bytes = share_bytes(records_bytes, num_layers, 1 + len(elsewhere))
    with (
        ExpertEncoder(fmt, device) as encoder,
        StoreWriter(
            out,
            identity,
            num_experts=mapped.num_experts,
            needed_bytes=other_bytes + most_records_bytes,
            elsewhere=elsewhere,
            needed_elsewhere_bytes=most_records_bytes,
        ) as writer,
    ):
        job = _Preparation(checkpoint, mapped, fmt, layouts, encoder, writer, Meter(progress, checkpoint.size_bytes))
        job.write_dense()
        job.write_experts()
        writer.finish(job.write_rest(name, digests))
    return out


def prepare_cached(
    source: Path | str,
    *,
    layout: Layout | None = None,
    fmt: BaseFormat | None = None,
    device: str = "auto",
    convert_to: Literal["bf16"] | None = None,
    progress: ProgressSink | None = None,
) -> Path:
    """The store of `source`: itself when it is one, else the cached one, prepared now if need be.

    Where another process prepares it, waits for that, and goes on with it should that process end before it is done.
    layout: None for the default's, or the other nested one where only that is there already. convert_to: as of
    `prepare_store`.
    """
    folder = resolve_source(source)
    if is_store(folder):
        return folder
    first = layout or default_layout(device)
    others = () if layout else (Layout.CODE_WIDTH, Layout.FIXED)
    place = partial(
        cache_folder_for, folder, name=name_of(source), fmt=fmt or default_format(folder), convert_to=convert_to
    )
    outs = [place(layout=each) for each in (first, *others)]
    while (there := next(filter(is_store, outs), None)) is None:
        try:
            return prepare_store(
                source, outs[0], layout=first, fmt=fmt, device=device, convert_to=convert_to, progress=progress
            )
        except StoreInUseError:
            Meter(progress, 1).add(0, "waiting for another process that prepares it")
            time.sleep(_LOOK_EVERY_S)
        except StoreError:
            if not is_store(outs[0]):  # else another process was faster
                raise
    return there


class _Preparation:
    """One run: what is read, how it is encoded, and where it goes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        mapped: CheckpointMap,
        fmt: BaseFormat,
        layouts: Sequence[Layout],
        encoder: ExpertEncoder,
        writer: StoreWriter,
        meter: Meter,
    ) -> None:
        self._checkpoint, self._mapped, self._fmt, self._layouts = checkpoint, mapped, fmt, layouts
        self._encoder, self._writer, self._meter = encoder, writer, meter
        self._num_layers, self._num_experts = len(mapped.module_names), mapped.num_experts
        self._reader = ExpertReader(checkpoint, mapped.pieces, mapped.matrices, mapped.grids)

    def write_dense(self) -> None:
        """One file below dense/ for each source file that has other tensors than experts."""
        dense = set(self._mapped.dense)
        for file in self._checkpoint.files:
            entries = [entry for entry in file.entries if entry.name in dense]
            if entries:
                self._writer.write_dense(file.path.name, _tensor_chunks(file, entries))
            self._meter.add(len(file.header) + sum(entry.num_bytes for entry in entries), "dense weights")

    def write_experts(self) -> None:
        """Every layer's base and expert records, from the first record that is not there yet."""
        keys = [ExpertKey(*divmod(position, self._num_experts)) for position in range(self._writer.num_records)]
        self._meter.add(sum(map(self._reader.num_bytes, keys)), "experts")
        with ExpertWorkers() as workers:
            for layer in range(self._writer.num_records // self._num_experts, self._num_layers):
                layout = self._writer.durable.layouts.get(layer, self._layouts[layer])
                self._append_layer(workers, layer, layout)
                if layout.needs_base and self._mean_residual_bits(layer) > MAX_RESIDUAL_BITS:
                    layout = Layout.PLAIN
                    self._writer.restart_layer(layer, layout)
                    self._meter.add(-self._num_experts * self._reader.num_bytes(ExpertKey(layer, 0)), "experts")
                    self._append_layer(workers, layer, layout)
                self._writer.commit(layer, layout)

    def write_rest(self, name: str, digests: Callable[[], Sequence[str]]) -> Manifest:
        """Tables and small files; returns the manifest that describes everything."""
        writer, mapped, files = self._writer, self._mapped, self._checkpoint.files
        base_file_bytes, experts_file_bytes = writer.pad_record_files()
        matrix_names = [matrix for matrix, _, _ in mapped.matrices]
        pieces = pack_pieces(mapped.pieces, [file.entries for file in files], matrix_names)
        writer.write_file("pieces.bin", [memoryview(pieces)])
        kept = [writer.write_file(f"headers/{file.path.name}", [memoryview(file.header)]) for file in files]
        index = self._checkpoint.folder / INDEX_NAME
        if index.is_file():
            kept.append(writer.write_file(f"headers/{INDEX_NAME}", _file_chunks(index)))
        for path in self._checkpoint.kept_files():
            folder = "other" if is_weights_name(path.name) else "model"
            kept.append(writer.write_file(f"{folder}/{path.name}", _file_chunks(path)))
        self._meter.add(0, "source checksums")
        return Manifest(
            moespeq=__version__,
            name=name,
            model_type=mapped.model_type,
            num_experts=mapped.num_experts,
            top_k=mapped.top_k,
            module_names=mapped.module_names,
            matrices=mapped.matrices,
            base_format=self._fmt,
            layouts=tuple(writer.durable.layouts[layer] for layer in range(self._num_layers)),
            source=tuple(
                SourceFile(file.path.name, file.size_bytes, len(file.header), digest)
                for file, digest in zip(files, digests(), strict=True)
            ),
            files=(*writer.durable.dense.values(), *kept),
            base_file_bytes=base_file_bytes,
            experts_file_bytes=experts_file_bytes,
            records=writer.table("records.bin"),
            pieces=writer.table("pieces.bin"),
        )

    def _append_layer(self, workers: ExpertWorkers, layer: int, layout: Layout) -> None:
        """Append a layer's missing records; the last ones are left for the caller to judge and commit."""
        first = self._writer.num_records - layer * self._num_experts
        keys = [ExpertKey(layer, expert) for expert in range(first, self._num_experts)]
        expert_bytes, uncommitted_bytes = self._reader.num_bytes(ExpertKey(layer, 0)), 0
        for expert in workers.in_order(lambda key: self._encoder.encode(self._reader.read(key), layout), keys):
            if uncommitted_bytes >= COMMIT_BYTES:
                self._writer.commit(layer, layout)
                uncommitted_bytes = 0
            crc32s = expert.base_crc32, expert.record_crc32
            self._writer.append(view_of(expert.base), view_of(expert.record), crc32s=crc32s)
            uncommitted_bytes += expert_bytes
            self._meter.add(expert_bytes, f"layer {layer + 1} of {self._num_layers}")

    def _mean_residual_bits(self, layer: int) -> float:
        rows = self._writer.rows(layer * self._num_experts, (layer + 1) * self._num_experts)
        shapes = [matrix[1:] for matrix in self._mapped.matrices]
        return residual_bits(sum(row.record.num_bytes for row in rows), shapes) / self._num_experts


def _tensor_chunks(file: SafetensorsFile, entries: Sequence[TensorEntry]) -> Iterator[memoryview]:
    """A safetensors file of `entries` only."""
    yield memoryview(build_header(entries))
    for entry in entries:
        yield from file.chunks(entry, CHUNK_BYTES)


def _file_chunks(path: Path) -> Iterator[memoryview]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield memoryview(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
