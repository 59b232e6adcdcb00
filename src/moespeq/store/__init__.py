"""Bytes at rest: safetensors files read as untrusted input, and the store that a checkpoint becomes.

Owns the layout on disk, its checksums and its durability; knows no model and no policy. Experts arrive as
bytes with an (layer, expert) key, and leave the same way.
"""

from __future__ import annotations

from moespeq.store.checkpoint import Checkpoint, Place, open_checkpoint
from moespeq.store.manifest import MANIFEST_NAME, Manifest, SourceFile, StoredFile
from moespeq.store.pieces import ExpertPiece
from moespeq.store.reader import DiskSource, Store
from moespeq.store.safetensors_file import SafetensorsFile, TensorEntry
from moespeq.store.writer import StoreWriter

__all__ = [
    "MANIFEST_NAME",
    "Checkpoint",
    "DiskSource",
    "ExpertPiece",
    "Manifest",
    "Place",
    "SafetensorsFile",
    "SourceFile",
    "Store",
    "StoreWriter",
    "StoredFile",
    "TensorEntry",
    "open_checkpoint",
]
