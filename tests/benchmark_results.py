"""A small, complete benchmark result with round numbers, as run.py would write it."""

from __future__ import annotations

from typing import Any

from summary import summarize_result

__all__ = ["make_result", "make_run"]

GB = 10**9


def make_run(row: str, link: str, prompt: int, decode_s: float, **changes: Any) -> dict[str, Any]:
    """11 tokens in two rounds of k = 4, each of 5 tokens, 1 GB a token."""
    rounds = {
        "k": [4, 4],
        "accepted": [4, 4],
        "committed": [5, 5],
        "hits": [10, 10],
        "late": [1, 2],
        "misses": [3, 4],
        "link_bytes": [5 * GB, 5 * GB],
        "draft_s": [0.1, 0.1],
        "verify_s": [0.3, 0.5],
        "stall_s": [0.2, 0.2],
        "link_busy_s": [0.3, 0.3],
        "stall_busy_s": [0.1, 0.2],
    }
    run = {
        "row": row,
        "link": link,
        "prompt": prompt,
        "repetition": prompt,
        "error": None,
        "prompt_tok": 60,
        "new_tok": 11,
        "tokens_sha256": f"tokens of prompt {prompt}",
        "ttft_s": 0.5,
        "decode_s": decode_s,
        "prefill_link_bytes": 10 * GB,
        "prefill_used_bytes": 9 * GB,
        "decode_link_bytes": 10 * GB,
        "wasted_bytes": 2 * GB,
        "bytes_by_cause": {"demand": 20 * GB},
        "routes": {"exact": 8, "same_set": 1, "wrong": 1},
        "rounds": rounds,
    }
    return {**run, **changes}


def make_result(shape: str = "qwen1.5-moe") -> dict[str, Any]:
    """on_demand takes 2 s for 10 tokens, nested 1 s and 4 s; the third prompt of nested failed."""
    runs = [make_run("on_demand", link, prompt, 2.0) for link in ("as-is", "25GB") for prompt in range(3)]
    runs += [make_run("nested", "as-is", prompt, decode_s) for prompt, decode_s in enumerate((1.0, 1.0, 4.0))]
    runs += [make_run("nested", "25GB", 0, 1.0), make_run("nested", "25GB", 1, 0.0, error="The link broke.")]
    result = {
        "schema": 1,
        "kind": "e2e",
        "commit": "0123456789ab",
        "shape": shape,
        "budget_bytes": 12 << 30,
        "device": {"name": "Some GPU", "memory_bytes": 80 << 30, "cuda": "13.0"},
        "machine": {"cpu": "Some CPU", "cores": 16, "memory_bytes": 128 << 30, "system": "Linux"},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": None},
        "store": {
            "experts_per_layer": 60,
            "moe_layers": 24,
            "record_bytes": 0.1 * GB,
            "plain_record_bytes": 0.2 * GB,
            "base_bytes": 0.05 * GB,
            "bits_per_weight": 8.6,
        },
        "link": {"bytes_per_s": 50 * GB, "by_block": {"pinned": {"65536": 10 * GB, "1048576": 50 * GB}}},
        "runs": runs,
        "ttft": [make_run("nested", "as-is", number, 0.0, prompt_tok=64, new_tok=1) for number in range(3)],
        "identity": [make_run(row, "as-is", number, 1.0) for row in ("nested", "nested_k0") for number in range(4)],
        "activity": {"nested": {"link_utilisation": 0.9, "device_busy_share": 0.7}},
        "accelerate": {
            "ttft_s": 2.0,
            "tpot_s": 1.0,
            "one_token": {"wall_s": 1.0, "kernel_s": 0.1, "copy_s": 0.6, "both_s": 0.05, "idle_s": 0.35,
                          "copied_bytes": 12 * GB, "link_utilisation": 0.6, "device_busy_share": 0.1},
        },
        "engines": {
            "nested": {
                "plan": {"num_slots": 90, "total_bytes": 12 << 30, "reasons": {"num_slots": "90 fit"}},
                "facts": {"draft": "one graph"},
                "load_s": 10.0,
                "rss_bytes": 20 << 30,
                "peak_device_bytes": 12 << 30,
            }
        },
    }  # fmt: skip
    summarize_result(result)
    return result
