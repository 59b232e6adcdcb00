"""The Python face: `load` an engine, or `from_pretrained` a transformers model that decodes speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.prepare import ProgressSink, cache_folder_for, is_store, name_of, prepare_store, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["from_pretrained", "load", "store_for"]


def store_for(source: str | Path, progress: ProgressSink | None = None) -> Path:
    """The store behind `source`: itself, or a checkpoint's store in the cache, prepared the first time."""
    path = Path(source)
    if is_store(path):
        return path
    checkpoint = resolve_source(source)
    store = cache_folder_for(checkpoint, name_of(source))
    return store if is_store(store) else prepare_store(checkpoint, store, progress=progress)


def load(source: str | Path, *, progress: ProgressSink | None = None, **options: Any) -> Engine:
    """Load a store, a checkpoint folder or a hub id; `options` are the fields of LoadOptions, sizes also as "12GiB".

    Use it as a context manager. Raises a MoespeqError with one sentence that says what to do.
    """
    return open_engine(store_for(source, progress), LoadOptions.from_mapping(options))


def from_pretrained(source: str | Path, *, progress: ProgressSink | None = None, **options: Any) -> PreTrainedModel:
    """A transformers model whose ordinary `generate` runs the speculative loop; options as for `load`."""
    from moespeq.decode.hugging_face import speculative_model

    return speculative_model(load(source, progress=progress, **options))
