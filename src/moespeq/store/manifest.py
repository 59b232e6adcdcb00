"""What a store says about itself: `manifest.json`, read strictly.

    STORE/manifest.json            this
          records.bin pieces.bin   tables: where records lie; which source tensor holds which expert's rows
          base.bin experts.bin     base records; residual or plain records
          dense/*.safetensors      every tensor that is not a routed expert, one file per source file
          model/*                  config, tokenizer, template: the source's other files, verbatim
          headers/*                the header of each source file, and the index, verbatim
          other/*                  weights of other formats and the like: kept for export, never parsed

Only this file knows the schema. A key too many or too few is an error: guessing would turn into wrong
weights. Every other checksum is in here, so the manifest carries one of itself. Names become paths when a
checkpoint is exported, so a name that could leave its folder is an error too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from moespeq.errors import MoespeqError, StoreError
from moespeq.model_place import MANIFEST_NAME, require_store
from moespeq.nested import BaseFormat, Layout
from moespeq.store.checkpoint import is_plain_name

__all__ = ["MANIFEST_NAME", "SCHEMA", "Manifest", "SourceFile", "StoredFile", "Table", "digest_of"]

SCHEMA = 1
FOLDERS = ("dense", "model", "headers", "other")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One weight file of the checkpoint, and what export must reproduce."""

    name: str
    size_bytes: int
    header_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the store that is checked as a whole; `path` is FOLDER/NAME inside the store."""

    path: str
    size_bytes: int
    sha256: str

    @property
    def folder(self) -> str:
        """`dense`, `model`, `headers` or `other`."""
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        """The file's name in its folder, which is its name in the checkpoint."""
        return self.path.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Table:
    """Size and CRC-32 of a binary table."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole description of a store.

    `layouts` has one entry per MoE layer; `matrices` are (name, out, in) in record order; `module_names` are
    the model's experts modules in layer order; `base_file_bytes` and `experts_file_bytes` are exact sizes.
    """

    moespeq: str
    name: str
    model_type: str
    num_experts: int
    top_k: int
    module_names: tuple[str, ...]
    matrices: tuple[tuple[str, int, int], ...]
    base_format: BaseFormat
    layouts: tuple[Layout, ...]
    source: tuple[SourceFile, ...]
    files: tuple[StoredFile, ...]
    base_file_bytes: int
    experts_file_bytes: int
    records: Table
    pieces: Table

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each matrix of an expert."""
        return tuple((rows, cols) for _, rows, cols in self.matrices)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return len(self.layouts)

    def to_json(self) -> str:
        """The text of `manifest.json`: the same bytes for the same store."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["base_format"] = self.base_format.to_json()
        values["layouts"] = [layout.value for layout in self.layouts]
        values["source"] = [asdict(file) for file in self.source]
        values["files"] = [asdict(file) for file in self.files]
        values["records"], values["pieces"] = asdict(self.records), asdict(self.pieces)
        signed = {"schema": SCHEMA, **values}
        return json.dumps({**signed, "digest": digest_of(signed)}, indent=1) + "\n"

    @classmethod
    def load(cls, store: Path) -> Manifest:
        """Read a store's manifest. Raises StoreError for another schema, a wrong key or a wrong type."""
        path = store / MANIFEST_NAME
        try:
            require_store(store)
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{path} cannot be read ({error}); prepare the store again.") from error
        schema = values.get("schema") if isinstance(values, dict) else None
        if schema != SCHEMA:
            raise StoreError(
                f"{path} has schema {schema!r} and this version reads schema {SCHEMA}; "
                "prepare the store again with this version."
            )
        try:
            if values.pop("digest", None) != digest_of(values):
                raise ValueError("it does not match its digest")
            values.pop("schema")
            return _from_json(values)
        except (ValueError, TypeError, MoespeqError) as error:
            raise StoreError(f"{path} is damaged ({error}); prepare the store again.") from error


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's values, whatever their order and spacing in the file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _from_json(values: dict[str, Any]) -> Manifest:
    _require_keys(values, Manifest)
    manifest = Manifest(
        moespeq=_typed(values["moespeq"], str),
        name=_typed(values["name"], str),
        model_type=_typed(values["model_type"], str),
        num_experts=_count(values["num_experts"]),
        top_k=_count(values["top_k"]),
        module_names=tuple(_typed(name, str) for name in _typed(values["module_names"], list)),
        matrices=tuple(_matrix(matrix) for matrix in _typed(values["matrices"], list)),
        base_format=BaseFormat.from_json(_typed(values["base_format"], dict)),
        layouts=tuple(Layout(layout) for layout in _typed(values["layouts"], list)),
        source=tuple(_record(file, SourceFile) for file in _typed(values["source"], list)),
        files=tuple(_record(file, StoredFile) for file in _typed(values["files"], list)),
        base_file_bytes=_count(values["base_file_bytes"]),
        experts_file_bytes=_count(values["experts_file_bytes"]),
        records=_record(values["records"], Table),
        pieces=_record(values["pieces"], Table),
    )
    if not 1 <= manifest.top_k <= manifest.num_experts:
        raise ValueError(f"{manifest.top_k} of {manifest.num_experts} experts cannot be chosen")
    if not manifest.layouts or len(manifest.module_names) != len(manifest.layouts):
        raise ValueError(f"{len(manifest.module_names)} modules have {len(manifest.layouts)} layouts")
    for name in [*(file.name for file in manifest.source), *(file.name for file in manifest.files)]:
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not a plain file name")
    for file in manifest.files:
        if file.folder not in FOLDERS:
            raise ValueError(f"{file.path!r} is in no folder of a store")
    return manifest


def _matrix(values: Any) -> tuple[str, int, int]:
    name, rows, cols = _typed(values, list)
    return _typed(name, str), _count(rows), _count(cols)


def _record(values: Any, kind: type[T]) -> T:
    """A dataclass of texts and counts from its JSON object."""
    _require_keys(_typed(values, dict), kind)
    texts = {name for name, kind_name in kind.__annotations__.items() if kind_name == "str"}
    return kind(**{key: _typed(value, str) if key in texts else _count(value) for key, value in values.items()})


def _count(value: Any) -> int:
    if _typed(value, int) < 0:
        raise ValueError(f"{value} is negative")
    return int(value)


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


def _require_keys(values: dict[str, Any], kind: type[Any]) -> None:
    expected = {field.name for field in fields(kind)}
    if missing := expected - values.keys():
        raise ValueError(f"{min(missing)!r} is missing")
    if unknown := values.keys() - expected:
        raise ValueError(f"{min(unknown)!r} is not a key of schema {SCHEMA}")
