"""Facts about a store or checkpoint, from its headers and configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moespeq.config import LoadOptions
from moespeq.decode.planning import needs_of
from moespeq.errors import UsageError
from moespeq.model.checkpoint_map import map_checkpoint
from moespeq.model.graphs.suitable import passes_on_cuda
from moespeq.model.image_reader import why_no_images_in
from moespeq.model.loading import load_config
from moespeq.nested import Layout
from moespeq.plan import least_memory_bytes
from moespeq.prepare import is_store
from moespeq.prepare.conversion import converted_from
from moespeq.prepare.layouts import layouts_of
from moespeq.store import Store, open_checkpoint

__all__ = ["describe_model"]

_CONTEXTS_TOK = (512, 4096)


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
            "experts_per_layer": manifest.num_experts,
            "top_k": manifest.top_k,
            "context_tok": needs.shape.max_context_tok,
            "target": _target(store),
            "records": ", ".join(layouts),
            "bits_per_weight": round(8 * records_bytes / weights, 3),
            "base_bits": manifest.base_format.bits,
            "base_group": manifest.base_format.group,
            "base_bits_per_weight": round(8 * needs.base_bytes / weights, 3),
            "dense_bytes": needs.dense_bytes,
            "base_bytes": needs.base_bytes,
            "records_bytes": records_bytes,
            "slot_bytes": needs.slot_bytes,
            "kv_bytes_per_tok": needs.shape.kv_bytes_per_tok,
            "passes_on_cuda": passes_on_cuda(load_config(store.model_folder), manifest.layouts),
            "images": _images(store.model_folder),
            "least_memory_bytes": _least_memory(store),
        }


def _target(store: Store) -> str:
    """What the exact weights are, and what they were where they were rounded."""
    kinds = " and ".join(sorted({"bf16" if each.is_bf16 else each.value for each in store.manifest.layouts}))
    before = converted_from(store)
    return kinds if before is None else f"{kinds}, rounded from {before} as asked for"


def _least_memory(store: Store) -> dict[str, dict[str, dict[str, int]]]:
    """The smallest device memory: device -> tokens of context, a short one and the default -> way to run -> bytes."""
    is_plain = not any(layout.needs_base for layout in store.manifest.layouts)
    ways: dict[str, dict[str, Any]] = {
        "with_draft": {"records": "store"},
        "base_travels": {"records": "whole", "k": 0},
        "on_demand": {"records": "store" if is_plain else "whole", "mode": "on_demand"},
    }
    needs = {records: needs_of(store, records) for records in ("store", "whole")}
    contexts = sorted({min(tok, needs["store"].shape.max_context_tok) for tok in _CONTEXTS_TOK})
    return {
        device: {
            str(tok): {
                way: least_memory_bytes(needs[given["records"]], LoadOptions(device=device, ctx_size=tok, **given))
                for way, given in ways.items()
            }
            for tok in contexts
        }
        for device in ("cpu", "cuda")
    }


def _images(folder: Path) -> str:
    """Whether prompts may hold images, for people."""
    reason = why_no_images_in(folder, load_config(folder))
    return "taken; prompts with them are prefilled eagerly" if reason is None else f"not taken: {reason}"


def _describe_checkpoint(folder: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(folder)
    mapped = map_checkpoint(checkpoint)
    experts = {piece.tensor for piece in mapped.pieces}
    as_stored = ["BF16" if dtype == "F32" else dtype for dtype in mapped.dtypes]
    return {
        "kind": "checkpoint",
        "model": folder.name,
        "family": mapped.model_type,
        "moe_layers": len(mapped.module_names),
        "experts_per_layer": mapped.num_experts,
        "top_k": mapped.top_k,
        "experts": " and ".join(sorted(set(mapped.dtypes))),
        "size_bytes": checkpoint.size_bytes,
        "routed_experts_bytes": sum(checkpoint.tensors[name].entry.num_bytes for name in experts),
        "passes_on_cuda": passes_on_cuda(load_config(folder), layouts_of(as_stored, Layout.FIXED)),
        "images": _images(folder),
        "next": f"moespeq prepare {folder}{' --convert-to bf16' * ('F32' in mapped.dtypes)}",
    }
