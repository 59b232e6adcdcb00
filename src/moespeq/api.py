"""The Python face: `load` an engine, or `from_pretrained` a transformers model that decodes speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.errors import UsageError
from moespeq.prepare import ProgressSink, prepare_cached

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["from_pretrained", "load"]


def load(source: str | Path, *, progress: ProgressSink | None = None, **options: Any) -> Engine:
    """Load a store, a checkpoint folder or a hub id; `options` are the fields of LoadOptions, sizes also as "12GiB".

    Use it as a context manager. Raises a MoespeqError with one sentence that says what to do.
    """
    parsed = LoadOptions.from_mapping(options)
    if not isinstance(source, (str, Path)):
        raise UsageError(f"A model is the path of a store or checkpoint, or a hub id, got {source!r}.")
    if progress is not None and not callable(getattr(progress, "update", None)):
        raise UsageError(f"progress takes an object with an `update` method, got {progress!r}.")
    store = prepare_cached(source, device=parsed.device, convert_to=parsed.convert_to, progress=progress)
    return open_engine(store, parsed, progress=progress)


def from_pretrained(source: str | Path, *, progress: ProgressSink | None = None, **options: Any) -> PreTrainedModel:
    """A transformers model whose ordinary `generate` runs the speculative loop; options as for `load`."""
    from moespeq.decode.hugging_face import speculative_model

    return speculative_model(load(source, progress=progress, **options))
