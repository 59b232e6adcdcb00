"""Checkpoint to store, store to checkpoint, and the proof that they are the same."""

from __future__ import annotations

from moespeq.prepare.encoder import default_layout
from moespeq.prepare.export import export_checkpoint
from moespeq.prepare.prepare import prepare_cached, prepare_store, write_store
from moespeq.prepare.source import (
    cache_folder_for,
    default_output,
    is_store,
    name_of,
    not_kept,
    resolve_description,
    resolve_small_files,
    resolve_source,
)
from moespeq.prepare.verify import VerifyReport, verify_store
from moespeq.progress import ProgressSink

__all__ = [
    "ProgressSink",
    "VerifyReport",
    "cache_folder_for",
    "default_layout",
    "default_output",
    "export_checkpoint",
    "is_store",
    "name_of",
    "not_kept",
    "prepare_cached",
    "prepare_store",
    "resolve_description",
    "resolve_small_files",
    "resolve_source",
    "verify_store",
    "write_store",
]
