"""Facts about a store or checkpoint, from its headers and configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moespeq.config import format_bytes
from moespeq.decode.assembly import needs_of
from moespeq.errors import UsageError
from moespeq.model.checkpoint_map import map_checkpoint
from moespeq.prepare import is_store
from moespeq.store import Store, open_checkpoint

__all__ = ["describe_model"]


def describe_model(source: str | Path) -> dict[str, Any]:
    """What `moespeq info` prints: kind, family, experts, and for a store formats and sizes. Raises MoespeqError."""
    path = Path(source)
    if not path.is_dir():
        raise UsageError(f"{source} is no local folder; `moespeq prepare {source}` downloads a hub id.")
    return _describe_store(path) if is_store(path) else _describe_checkpoint(path)


def _describe_store(path: Path) -> dict[str, Any]:
    with Store.open(path) as store:
        manifest, needs = store.manifest, needs_of(store)
        layouts = sorted({layout.value for layout in manifest.layouts})
        weights = needs.num_records * needs.shape.weights_per_expert
        records_bytes = sum(row.record.num_bytes for row in store.records.rows)
        return {
            "kind": "store",
            "model": manifest.name,
            "family": manifest.model_type,
            "moe_layers": manifest.num_layers,
            "experts": f"{manifest.num_experts} a layer, top {manifest.top_k}",
            "context_tok": needs.shape.max_context_tok,
            "records": f"{', '.join(layouts)}, {8 * records_bytes / weights:.2f} bits a weight",
            "base": f"{manifest.base_format.bits} bits, groups of {manifest.base_format.group}, "
            f"{8 * needs.base_bytes / weights:.2f} bits a weight",
            "dense_weights": format_bytes(needs.dense_bytes),
            "base_bank": format_bytes(needs.base_bytes),
            "expert_records": format_bytes(records_bytes),
            "slot": format_bytes(needs.slot_bytes),
            "kv_cache_per_1k_tok": format_bytes(1024 * needs.shape.kv_bytes_per_tok),
            "least_device_memory": f"{format_bytes(needs.dense_bytes + needs.base_bytes)}, KV cache, workspace, 1 slot",
        }


def _describe_checkpoint(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    mapped = map_checkpoint(checkpoint)
    weights = len(mapped.module_names) * mapped.num_experts * sum(rows * cols for _, rows, cols in mapped.matrices)
    return {
        "kind": "checkpoint",
        "model": folder.name,
        "family": mapped.model_type,
        "moe_layers": len(mapped.module_names),
        "experts": f"{mapped.num_experts} a layer, top {mapped.top_k}",
        "size": format_bytes(checkpoint.size_bytes),
        "routed_experts": format_bytes(2 * weights),
        "next": f"moespeq prepare {folder}",
    }
