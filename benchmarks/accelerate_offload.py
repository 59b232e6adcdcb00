"""The baseline everybody has: transformers with accelerate's offload to host memory, and where its time goes.

`device_map="auto"` keeps the layers that fit into the budget on the device; the others are copied in whole, every
token, because a hook moves a module's weights before its forward and knows nothing of routing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

from activity import profile


class TokenTimes(StoppingCriteria):
    """Notes when each token is known; never stops anything."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids[:, -1].tolist()  # waits until the token is on the host
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def measure_accelerate(
    checkpoint: Path, tokens: Sequence[int], *, budget_bytes: int, host_bytes: int, new_tok: int, device: str
) -> dict[str, Any]:
    """Greedy tokens of one prompt, timed; on a GPU, one more token under the profiler."""
    begin_s = time.perf_counter()
    max_memory: dict[int | str, int] = {"cpu": host_bytes} if device == "cpu" else {0: budget_bytes, "cpu": host_bytes}
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map="auto", max_memory=max_memory
    ).eval()
    load_s = time.perf_counter() - begin_s
    times = TokenTimes()
    prompt = torch.tensor([list(tokens)], device=device)
    begin_s = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tok,
            min_new_tokens=new_tok,
            do_sample=False,
            stopping_criteria=[times],
        )
    placed = list(getattr(model, "hf_device_map", {}).values())  # absent where everything is in one place
    return {
        "load_s": load_s,
        "prompt_tok": len(tokens),
        "new_tok": len(times.times_s),
        "ttft_s": times.times_s[0] - begin_s,
        "tpot_s": (times.times_s[-1] - times.times_s[0]) / max(1, len(times.times_s) - 1),
        "tokens": output[0, prompt.shape[1] :].tolist(),
        "modules_on_device": sum(place not in ("cpu", "disk") for place in placed),
        "modules_offloaded": sum(place in ("cpu", "disk") for place in placed),
        "one_token": _profile_token(model, prompt[:, :1]) if device == "cuda" else None,
    }


def _profile_token(model: PreTrainedModel, token: torch.Tensor) -> dict[str, float]:
    with torch.inference_mode():
        return profile(lambda: model(input_ids=token, use_cache=False)).to_json()
