"""What a store says about itself: `manifest.json`, read strictly.

    STORE/manifest.json            this
          records.bin pieces.bin   tables: where records lie; which source tensor holds which expert's rows
          base.bin                 base records
          experts.bin experts-N.bin   residual or plain records, layers dealt to them in turn; links to other disks
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
from moespeq.store.checkpoint import INDEX_NAME, is_plain_name
from moespeq.store.elsewhere import require_inside
from moespeq.store.untrusted import parse_json, read_regular, shown

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA",
    "UPGRADABLE",
    "Manifest",
    "SourceFile",
    "StoredFile",
    "Table",
    "digest_of",
    "parse_values",
    "read_values",
]

SCHEMA = 2
UPGRADABLE = (1,)  # by upgrade.py
_MOST_BYTES = 64 << 20
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

    @property
    def is_exported(self) -> bool:
        """Whether it is, as it is, a file of the checkpoint."""
        return self.folder in ("model", "other") or (self.folder == "headers" and self.name == INDEX_NAME)


@dataclass(frozen=True, slots=True)
class Table:
    """Size and CRC-32 of a binary table."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole description of a store.

    `layouts` has one entry per MoE layer; `matrices` are (name, out, in) in record order; `module_names` are
    the model's experts modules in layer order; `base_file_bytes` and `experts_file_bytes` are exact sizes, of every
    file of expert records.
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
    experts_file_bytes: tuple[int, ...]
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
        require_store(store)
        values = read_values(path)
        schema = values.pop("schema")
        if schema in UPGRADABLE:
            raise StoreError(
                f"{path} has schema {schema} and this version reads schema {SCHEMA}; `moespeq upgrade {store}` changes "
                "it without touching a weight."
            )
        return parse_values(values, path)


def read_values(path: Path) -> dict[str, Any]:
    """What a manifest of this or an upgradable schema says, without its digest, which is checked. Raises StoreError."""
    require_inside(path, path.parent)
    try:
        values = parse_json(read_regular(path, _MOST_BYTES))
        if not isinstance(values, dict) or type(values.get("schema")) is not int:
            raise StoreError(f"{path} names no schema; prepare the store again.")
        if (schema := values["schema"]) not in (SCHEMA, *UPGRADABLE):
            raise StoreError(
                f"{path} has schema {schema} and this version reads schema {SCHEMA}; prepare the store again with this "
                "version."
            )
        if values.pop("digest", None) != digest_of(values):
            raise StoreError(f"{path} is damaged (it does not match its digest); prepare the store again.")
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}); prepare the store again.") from error
    return values


def parse_values(values: dict[str, Any], path: Path) -> Manifest:
    """The manifest of this schema's values. Raises StoreError that names `path`."""
    try:
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
        experts_file_bytes=tuple(_count(size) for size in _typed(values["experts_file_bytes"], list)),
        records=_record(values["records"], Table),
        pieces=_record(values["pieces"], Table),
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise ValueError for what no store can be, or what could leave its folder."""
    num_layers = len(manifest.layouts)
    if not 1 <= manifest.top_k <= manifest.num_experts:
        raise ValueError(f"{manifest.top_k} of {manifest.num_experts} experts cannot be chosen")
    if not num_layers or len(set(manifest.module_names)) != num_layers:
        raise ValueError(f"{len(set(manifest.module_names))} modules have {num_layers} layouts")
    names = {name for name, _, _ in manifest.matrices}
    if not names or len(names) != len(manifest.matrices) or not all(min(shape) for shape in manifest.shapes):
        raise ValueError("its experts' matrices are none, empty or of one name")
    if not 1 <= len(manifest.experts_file_bytes) <= num_layers:
        raise ValueError(f"{num_layers} layers lie in {len(manifest.experts_file_bytes)} files")
    for file in manifest.files:
        if file.folder not in FOLDERS:
            raise ValueError(f"{shown(file.path)} is in no folder of a store")
    for name in [*(file.name for file in manifest.source), *(file.name for file in manifest.files)]:
        if not is_plain_name(name):
            raise ValueError(f"{shown(name)} is not a plain file name")
    exported = [*(file.name for file in manifest.source), *(file.name for file in manifest.files if file.is_exported)]
    for names_of in (exported, [file.path for file in manifest.files]):
        if len(set(names_of)) != len(names_of):
            raise ValueError("two of its files have one name")


def _matrix(values: Any) -> tuple[str, int, int]:
    name, rows, cols = _typed(values, list)
    return _typed(name, str), _count(rows), _count(cols)


def _record(values: Any, kind: type[T]) -> T:
    """A dataclass of texts and counts from its JSON object."""
    _require_keys(_typed(values, dict), kind)
    texts = {name for name, kind_name in kind.__annotations__.items() if kind_name == "str"}
    return kind(**{key: _typed(value, str) if key in texts else _count(value) for key, value in values.items()})


def _count(value: Any) -> int:
    if not 0 <= _typed(value, int) < 1 << 63:
        raise ValueError(f"{shown(value)} is no count")
    return int(value)


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{shown(value)} is not of type {kind.__name__}")
    return value


def _require_keys(values: dict[str, Any], kind: type[Any]) -> None:
    expected = {field.name for field in fields(kind)}
    if missing := expected - values.keys():
        raise ValueError(f"{shown(min(missing))} is missing")
    if unknown := values.keys() - expected:
        raise ValueError(f"{shown(min(unknown))} is not a key of schema {SCHEMA}")
