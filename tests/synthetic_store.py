"""Stores of random bytes, written by the real writer: everything about files without any model.

2 layers, 3 experts a layer, one 8 x 16 matrix; the records have the sizes asked for
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

from moespeq.nested import DEFAULT_FORMAT, Layout
from moespeq.store import ExpertPiece, Manifest, SourceFile, StoreWriter, TensorEntry
from moespeq.store.manifest import digest_of
from moespeq.store.pieces import pack_pieces
from moespeq.store.safetensors_file import build_header

NUM_LAYERS, NUM_EXPERTS = 2, 3
ROWS, COLS = 8, 16
RECORD_BYTES = (100, 4096, 70_000, 65_536, 8192, 131_077)
IDENTITY = {"checkpoint": "one"}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """A safetensors file of (dtype, shape, bytes), in the order given."""
    fields, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def records(sizes: Sequence[int] = RECORD_BYTES) -> list[tuple[bytes, bytes]]:
    """The (base, record) of every expert, the same on every call."""
    stream = random.Random(7)
    return [(stream.randbytes(96), stream.randbytes(size)) for size in sizes]


def new_writer(
    out: Path, *, needed_bytes: int = 0, elsewhere: Sequence[Path] = (), needed_elsewhere_bytes: int = 0
) -> StoreWriter:
    """The writer that begins `out` or goes on with it."""
    return StoreWriter(
        out,
        IDENTITY,
        num_experts=NUM_EXPERTS,
        needed_bytes=needed_bytes,
        elsewhere=elsewhere,
        needed_elsewhere_bytes=needed_elsewhere_bytes,
    )


def append(writer: StoreWriter, layer: int, layout: Layout = Layout.FIXED) -> None:
    """Append and commit one layer's records."""
    first = layer * NUM_EXPERTS
    for base, record in records()[first : first + NUM_EXPERTS]:
        writer.append(memoryview(base), memoryview(record))
    writer.commit(layer, layout)


def finish(writer: StoreWriter) -> None:
    """Write everything after the records, and make the store visible."""
    entries = source_entries()
    pieces = [
        ExpertPiece(entry.name, *divmod(i, NUM_EXPERTS), "up", 0, ROWS, None, False) for i, entry in enumerate(entries)
    ]
    base_file_bytes, experts_file_bytes = writer.pad_record_files()
    writer.write_file("pieces.bin", [memoryview(pack_pieces(pieces, [entries], ["up"]))])
    writer.finish(
        Manifest(
            moespeq="0",
            name="synthetic",
            model_type="none",
            num_experts=NUM_EXPERTS,
            top_k=1,
            module_names=tuple(f"layer.{layer}" for layer in range(NUM_LAYERS)),
            matrices=(("up", ROWS, COLS),),
            base_format=DEFAULT_FORMAT,
            layouts=tuple(writer.durable.layouts[layer] for layer in range(NUM_LAYERS)),
            source=(SourceFile("model.safetensors", 0, 0, hashlib.sha256(b"").hexdigest()),),
            files=tuple(writer.durable.dense.values()),
            base_file_bytes=base_file_bytes,
            experts_file_bytes=experts_file_bytes,
            records=writer.table("records.bin"),
            pieces=writer.table("pieces.bin"),
        )
    )


def source_entries() -> list[TensorEntry]:
    """The experts' tensors of the source file."""
    return [
        TensorEntry(f"expert.{layer}.{expert}", "BF16", (ROWS, COLS), 0, 2 * ROWS * COLS)
        for layer in range(NUM_LAYERS)
        for expert in range(NUM_EXPERTS)
    ]


def source_header() -> bytes:
    """The source file's header."""
    return build_header(source_entries())


def add_source_header(store: Path) -> None:
    """Give a finished store the header of its source file, which names the tensors of its pieces."""
    header = source_header()
    (store / "headers").mkdir()
    (store / "headers" / "model.safetensors").write_bytes(header)
    values = json.loads((store / "manifest.json").read_text())
    del values["digest"]
    stored = {"path": "headers/model.safetensors", "size_bytes": len(header)}
    values["files"].append({**stored, "sha256": hashlib.sha256(header).hexdigest()})
    values["source"][0].update(size_bytes=len(header) + sum(entry.num_bytes for entry in source_entries()))
    (store / "manifest.json").write_text(json.dumps({**values, "digest": digest_of(values)}))


def build(out: Path, *, elsewhere: Sequence[Path] = ()) -> Path:
    """A finished store."""
    with new_writer(out, elsewhere=elsewhere) as writer:
        dense = out.with_name("dense-source")
        writer.write_dense(
            "model.safetensors",
            [memoryview(write_safetensors(dense, {"norm": ("F32", [2], b"12345678")}).read_bytes())],
        )
        for layer in range(NUM_LAYERS):
            append(writer, layer)
        finish(writer)
    return out


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
