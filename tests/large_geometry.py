"""Checkpoints of large models without their bytes: config, headers and index are real, the data are holes in files.

    python tests/large_geometry.py FOLDER LAYERS EXPERTS      prints what planning and indexing took

Seconds are the processor's; `more_mib` is by how much memory grew beyond PyTorch and transformers, imported before.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moespeq.forecast import plan_model
from moespeq.inspection import describe_model
from moespeq.store import TensorEntry
from moespeq.store.safetensors_file import build_header

HIDDEN, INTERMEDIATE, VOCAB = 7168, 2048, 129_280
SHARD_BYTES = 40 << 30


def config(num_layers: int, num_experts: int) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": num_layers,
        "num_experts": num_experts,
        "num_experts_per_tok": 8,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
    }


def shapes(num_layers: int, num_experts: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.q_proj.weight"] = (64 * 128, HIDDEN)
        found[f"{prefix}.self_attn.k_proj.weight"] = found[f"{prefix}.self_attn.v_proj.weight"] = (4 * 128, HIDDEN)
        found[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, 64 * 128)
        found[f"{prefix}.self_attn.q_norm.weight"] = found[f"{prefix}.self_attn.k_norm.weight"] = (128,)
        found[f"{prefix}.input_layernorm.weight"] = found[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
        found[f"{prefix}.mlp.gate.weight"] = (num_experts, HIDDEN)
        for expert in range(num_experts):
            for name in ("gate_proj", "up_proj"):
                found[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = (INTERMEDIATE, HIDDEN)
            found[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    found["model.norm.weight"] = (HIDDEN,)
    found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def write_checkpoint(folder: Path, num_layers: int, num_experts: int) -> None:
    """Shards of at most 40 GiB, an index, a config."""
    shards: list[list[TensorEntry]] = [[]]
    filled_bytes = total_bytes = 0
    for name, shape in shapes(num_layers, num_experts).items():
        num_bytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if filled_bytes + num_bytes > SHARD_BYTES:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(TensorEntry(name, "BF16", shape, 0, num_bytes))
        filled_bytes, total_bytes = filled_bytes + num_bytes, total_bytes + num_bytes
    weight_map = {}
    for i, entries in enumerate(shards):
        path = folder / f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        header = build_header(entries)
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(entry.num_bytes for entry in entries))
        weight_map.update({entry.name: path.name for entry in entries})
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(num_layers, num_experts)))


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds and memory of `work`, whose peak must be above everything before it."""
    before_kib, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    work()
    took_s, peak_kib = time.process_time() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"s": round(took_s, 2), "more_mib": (peak_kib - before_kib) >> 10, "peak_mib": peak_kib >> 10}


def main(folder: Path, num_layers: int, num_experts: int) -> None:
    write_checkpoint(folder, num_layers, num_experts)
    plan = measured(lambda: plan_model(str(folder), device="cpu"))
    index = measured(lambda: describe_model(folder))
    print(json.dumps({"plan": plan, "index": index}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
