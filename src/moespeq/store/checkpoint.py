"""A checkpoint folder: which safetensors files belong to it, and where every tensor lies.

Owns the choice of files (one `model.safetensors`, or what `model.safetensors.index.json` names) and knows no
model. The index is untrusted like the headers: a name in it must be a plain file name inside the folder, and no file of
a checkpoint may be a link out of it, but for those that the hub's cache makes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moespeq.errors import CheckpointError
from moespeq.store.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile, TensorEntry
from moespeq.store.untrusted import is_kept_together, parse_json, read_regular, shown

__all__ = [
    "INDEX_NAME",
    "PICKLE_INDEX_NAME",
    "SINGLE_NAME",
    "Checkpoint",
    "Place",
    "is_plain_name",
    "is_weights_name",
    "open_checkpoint",
    "read_index",
    "read_small",
    "refuse_pickles",
    "require_kept_together",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_INDEX_NAME = "pytorch_model.bin.index.json"
_PICKLE_NAME = re.compile(r"(pytorch_)?model.*\.bin(\.index\.json)?|.*\.(pt|pth|ckpt|pkl)")
_NUM_SAMPLES, _SAMPLE_BYTES = 32, 256
MAX_KEPT_BYTES = 64 << 20
_MOST_NAME_BYTES = 255  # of a file, on Linux
# Weights in other formats, pickles, other safetensors than the model's: nothing that a model is loaded from.
_WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz", ".tflite")
)


class Place(NamedTuple):
    """Where a tensor lies: the position of its file in `Checkpoint.files`, and its entry there."""

    file: int
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers were all checked; `files` are in order of name."""

    folder: Path
    files: tuple[SafetensorsFile, ...]
    tensors: Mapping[str, Place]

    @property
    def size_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size_bytes for file in self.files)

    def fingerprint(self) -> str:
        """A hash that no other checkpoint has, from a little of it. Raises CheckpointError or StorageError.

        Fine-tunes of one model have equal names, sizes and headers: so it covers times and data samples too.
        The small files that a store keeps are covered as a whole.
        """
        digest = hashlib.sha256()
        for file in self.files:
            modified_ns = file.path.stat().st_mtime_ns
            digest.update(f"{file.path.name}\0{file.size_bytes}\0{modified_ns}\0".encode())
            digest.update(hashlib.sha256(file.header).digest())
            for sample in range(_NUM_SAMPLES):
                offset = file.size_bytes * sample // _NUM_SAMPLES
                digest.update(file.read(offset, min(_SAMPLE_BYTES, file.size_bytes - offset)).data)
        index = self.folder / INDEX_NAME
        for path in (*self.kept_files(), *([index] if index.is_file() else [])):
            digest.update(f"{path.name}\0".encode() + hashlib.sha256(read_small(path, MAX_HEADER_BYTES)).digest())
        return digest.hexdigest()

    def kept_files(self) -> tuple[Path, ...]:
        """Every other top-level file below 64 MiB, whatever it is: config, tokenizer, licence; by name.

        Raises CheckpointError for a link out of the folder.
        """
        kept = tuple(path for path in self._others() if _is_kept(path))
        for path in kept:  # a store holds their bytes, and a store is given away
            require_kept_together(path)
        return kept

    def not_kept(self) -> tuple[str, ...]:
        """Names of what else is in the folder: folders (with a slash), large files, links to nothing."""
        names = (path.name + "/" * path.is_dir() for path in self._others() if not _is_kept(path))
        return tuple(name if name.isprintable() else ascii(name) for name in names)

    def _others(self) -> Iterator[Path]:
        """What is in the folder beside the weight files and their index, by name."""
        own = {INDEX_NAME, *(file.path.name for file in self.files)}
        return (path for path in sorted(self.folder.iterdir()) if path.name not in own)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Check and index the safetensors files of `folder`. Raises CheckpointError, naming the bad file."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a checkpoint folder or a hub id such as org/name.")
    index_path = folder / INDEX_NAME
    weight_map: Mapping[str, str] = {}
    if (folder / SINGLE_NAME).is_file():
        names = [SINGLE_NAME]
    elif index_path.is_file():
        weight_map = read_index(index_path)
        names = sorted(set(weight_map.values()))
    else:
        refuse_pickles(folder)
        raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors are read.")
    files = tuple(_open_shard(folder / name) for name in names)
    tensors = _index_tensors(files)
    for tensor, name in weight_map.items():
        if tensor not in tensors or files[tensors[tensor].file].path.name != name:
            raise CheckpointError(
                f"{index_path} puts {shown(tensor)} into {name}, which lacks it; download both again."
            )
    return Checkpoint(folder, files, tensors)


def refuse_pickles(folder: Path) -> None:
    """Raise CheckpointError where the weights of `folder` are pickles: to open one is to run what it says."""
    names = (path.name for path in sorted(folder.iterdir()) if path.is_file())
    pickle = next(filter(_PICKLE_NAME.fullmatch, names), None)
    if pickle is not None:
        raise CheckpointError(
            f"{folder} holds its weights as pickles ({pickle}), which run code when opened and never are here; "
            "where you trust them, convert them with transformers' from_pretrained(FOLDER, dtype='auto')"
            ".save_pretrained(NEW_FOLDER), or take a revision of the model that has safetensors."
        )


def read_index(path: Path) -> dict[str, str]:
    """The weight map of a sharded checkpoint: tensor name to file name. Raises CheckpointError."""
    try:
        fields = parse_json(read_small(path, MAX_HEADER_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; download it again.")
    for name in weight_map.values():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {shown(name)}, no safetensors file of its folder; do not trust it.")
    return weight_map


def read_small(path: Path, most_bytes: int) -> bytes:
    """A small file of a checkpoint: config, index and the like. Raises CheckpointError."""
    require_kept_together(path)
    try:
        return read_regular(path, most_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give the folder of a complete checkpoint.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} cannot be read ({reason}); download it again.") from error


def require_kept_together(path: Path) -> None:
    """Raise CheckpointError for a file that is a link out of its checkpoint: what it names could be anything."""
    if not is_kept_together(path):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {path.resolve()}; put the file itself there, or give the folder "
            "that holds it."
        )


def is_weights_name(name: str) -> bool:
    """Whether `name` ends like weights or a pickle: such a file is never parsed."""
    return Path(name).suffix.lower() in _WEIGHT_SUFFIXES


def is_plain_name(name: str) -> bool:
    """Whether `name` is one file name: no folder, no parent, nothing a terminal would interpret."""
    is_one = name.isprintable() and name not in ("", ".", "..") and not {"/", "\\"} & set(name)
    return is_one and len(name.encode()) <= _MOST_NAME_BYTES


def _is_kept(path: Path) -> bool:
    return path.is_file() and is_plain_name(path.name) and path.stat().st_size < MAX_KEPT_BYTES


def _open_shard(path: Path) -> SafetensorsFile:
    require_kept_together(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing from the checkpoint; download it again.")
    return SafetensorsFile.open(path)


def _index_tensors(files: tuple[SafetensorsFile, ...]) -> dict[str, Place]:
    tensors: dict[str, Place] = {}
    for position, file in enumerate(files):
        for entry in file.entries:
            if entry.name in tensors:
                first = files[tensors[entry.name].file].path
                raise CheckpointError(
                    f"Tensor {shown(entry.name)} is in both {first} and {file.path.name}; remove one."
                )
            tensors[entry.name] = Place(position, entry)
    return tensors
