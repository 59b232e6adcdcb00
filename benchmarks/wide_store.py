"""A widened model straight into a store: nothing but the store's own 12.8 bits a weight is ever written.

A checkpoint of 28 to 93 GB costs more device time to write and read back than it is worth, so `prepare` reads from
files that exist as a recipe: their headers are real, their bytes are made when asked for. `spill` puts base.bin into
another folder, so that a store may share host memory (a tmpfs) and the disk.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from moespeq.nested import Layout
from moespeq.prepare import write_store
from moespeq.store import Checkpoint, Place, SafetensorsFile
from moespeq.store.output_path import partial_of
from moespeq.store.safetensors_file import Bytes, aligned_empty, build_header, parse_header
from widen import WideModel, entries_of

_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class GeneratedFile(SafetensorsFile):
    """A safetensors file that is not there: `read` makes the tensor."""

    model: WideModel

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """The bytes [offset, offset + num_bytes), which lie in one tensor."""
        entry = self.entries[bisect_right([entry.offset for entry in self.entries], offset) - 1]
        tensor = self.model.tensor(entry.name).view(-1).view(torch.uint8)
        buffer = aligned_empty(num_bytes)
        start = offset - entry.offset
        torch.from_numpy(buffer).copy_(tensor[start : start + num_bytes])
        return buffer


class GeneratedCheckpoint(Checkpoint):
    """A checkpoint of one generated file; `folder` holds its small files."""

    def fingerprint(self) -> str:
        """Of the recipe: the header and the small files."""
        digest = hashlib.sha256(self.files[0].header)
        for path in self.kept_files():
            digest.update(path.read_bytes())
        return digest.hexdigest()


def generated_checkpoint(model: WideModel, folder: Path) -> GeneratedCheckpoint:
    """Write the small files of `model` into `folder` and describe the rest."""
    model.write_small_files(folder)
    header = build_header(entries_of(model, model.names))
    size_bytes = len(header) + sum(map(model.num_bytes, model.names))
    entries = parse_header(header, size_bytes, Path(_NAME))
    file = GeneratedFile(folder / _NAME, size_bytes, header, entries, model)
    return GeneratedCheckpoint(folder, (file,), {entry.name: Place(0, entry) for entry in entries})


def build_store(
    model: WideModel, out: Path, *, layout: Layout = Layout.FIXED, device: str = "auto", spill: Path | None = None
) -> Path:
    """The store of `model` at `out`; its base records in the folder `spill`, where one is given."""
    checkpoint = generated_checkpoint(model, out.with_name(f"{out.name}-source"))
    if spill is not None:
        unfinished = partial_of(out) / "store"
        unfinished.mkdir(parents=True)
        spill.mkdir(parents=True, exist_ok=True)
        (unfinished / "base.bin").symlink_to((spill / "base.bin").resolve())
    recipe = hashlib.sha256(checkpoint.fingerprint().encode()).hexdigest()
    return write_store(checkpoint, out, name=out.stem, digests=lambda: [recipe], layout=layout, device=device)
