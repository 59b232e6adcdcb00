"""Where a checkpoint comes from and where its store goes: local folders, the hub, and the cache.

A hub id is refused by its `config.json` before any weights are downloaded. HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE mean what they mean to huggingface_hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from moespeq.cache_folder import cache_folder
from moespeq.errors import CheckpointError
from moespeq.model.supported import check_family
from moespeq.model_place import is_store, local_folder
from moespeq.nested import DEFAULT_FORMAT, BaseFormat, Layout
from moespeq.store import Store, open_checkpoint
from moespeq.store.checkpoint import INDEX_NAME, PICKLE_INDEX_NAME, SINGLE_NAME, read_index, refuse_pickles
from moespeq.store.manifest import SCHEMA

__all__ = [
    "cache_folder_for",
    "default_output",
    "is_store",
    "name_of",
    "not_kept",
    "resolve_description",
    "resolve_small_files",
    "resolve_source",
]

_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "*.tiktoken")


def resolve_source(source: Path | str) -> Path:
    """The folder of a checkpoint; a hub id is downloaded first. Raises CheckpointError."""
    folder = Path(source)
    small = resolve_description(source)
    if small == folder:
        return folder
    index = small / INDEX_NAME
    if not index.is_file():
        refuse_pickles(small)  # before they are looked for as safetensors
    weights = sorted(set(read_index(index).values())) if index.is_file() else [SINGLE_NAME]
    return _download(str(source), [*weights, *_SMALL_FILES])


def resolve_description(source: Path | str) -> Path:
    """The folder of a checkpoint; of a hub id only its config and index are downloaded. Raises CheckpointError."""
    folder = local_folder(source)
    if folder is not None:
        return folder
    small = _download(str(source), ["config.json", INDEX_NAME, PICKLE_INDEX_NAME])
    check_family(small)
    return small


def resolve_small_files(source: Path | str) -> Path:
    """The folder of config, tokenizer and templates: a store's or checkpoint's, of a hub id downloaded without weights.

    Raises CheckpointError or StoreError where nothing could be loaded.
    """
    folder = resolve_description(source)
    if is_store(folder):
        with Store.open(folder) as store:
            return store.model_folder
    if folder != Path(source):
        return _download(str(source), _SMALL_FILES)
    open_checkpoint(folder)
    check_family(folder)
    return folder


def name_of(source: Path | str) -> str:
    """What a person calls the checkpoint: a hub id as it is, a folder by its last part."""
    folder = Path(source)
    return folder.resolve().name if folder.exists() else str(source)


def default_output(source: Path | str) -> Path:
    """`NAME.moespeq` in the current folder."""
    return Path(f"{_last_part(name_of(source))}.moespeq")


def not_kept(checkpoint: Path) -> tuple[str, ...]:
    """Names in a checkpoint folder that its store does not hold, so that nobody deletes them unawares.

    Folders end in a slash. Raises CheckpointError.
    """
    return open_checkpoint(checkpoint).not_kept()


def cache_folder_for(
    checkpoint: Path,
    name: str | None = None,
    *,
    layout: Layout = Layout.FIXED,
    fmt: BaseFormat = DEFAULT_FORMAT,
    convert_to: str | None = None,
) -> Path:
    """Where a checkpoint folder run for the first time is prepared.

    `MOESPEQ_CACHE`, or `moespeq` in the user's cache folder, then NAME-HASH. The hash is the
    checkpoint's fingerprint, the options and the schema, so that a changed checkpoint gets a store of
    its own, and a version that writes another schema does not trip over an old one.
    """
    options = json.dumps([SCHEMA, fmt.to_json(), layout.value, *([convert_to] if convert_to else [])])
    digest = hashlib.sha256((open_checkpoint(checkpoint).fingerprint() + options).encode()).hexdigest()
    return cache_folder() / f"{_last_part(name or name_of(checkpoint))}-{digest[:12]}"


def _last_part(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _download(hub_id: str, patterns: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except (OSError, HFValidationError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{hub_id} is no local folder and was not downloaded ({reason}); check its name and HF_TOKEN."
        ) from error
