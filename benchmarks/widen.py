"""Widen a small trained MoE checkpoint to a published model's shape without changing what it computes.

    python benchmarks/widen.py SEED OUT --shape qwen1.5-moe [--layers N] [--device cuda]

Random weights measure nothing (routing collapses, acceptance is arbitrary) and published ones are tens of gigabytes, so
benchmarks repeat the channels of a trained seed: hidden channels `hidden` times, an expert's inner channels `inner`
times, attention heads `heads` times. Why logits stay: equal channels carry equal activations, and a weight that sums
over an axis repeated n times is divided by n. Routed experts also get noise whose sum over each group of n equal inputs
is zero: it cancels in the product, and gives the wide weights the spread, hence the bf16 entropy and INT4 error, of a
trained layer of that fan-in. Bytes and FLOPs are the published shape's; routing and acceptance are the seed's.

Every tensor has a random generator of its own, keyed by its name: any of them can be made alone, in any order.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from moespeq.store import TensorEntry
from moespeq.store.safetensors_file import build_header
from shapes import SHAPES, Factors

Axis = Literal["kept", "hidden", "inner", "heads"]
SHARD_BYTES = 2 << 30
WRITER_THREADS = 4
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_WIDENED_SIZES = {
    "hidden_size": "hidden",
    "intermediate_size": "inner",
    "moe_intermediate_size": "inner",
    "shared_expert_intermediate_size": "inner",
    "num_attention_heads": "heads",
    "num_key_value_heads": "heads",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """How a weight grows: what each of its axes counts, which axis is summed over, whether noise is added."""

    axes: tuple[Axis, ...]
    summed: int | None = None
    is_noisy: bool = False


RULES: tuple[tuple[str, Rule], ...] = (
    (r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", Rule(("inner", "hidden"), summed=1, is_noisy=True)),
    (r"experts\.\d+\.(down_proj|w2)\.weight", Rule(("hidden", "inner"), summed=1, is_noisy=True)),
    (r"shared_expert\.(gate|up)_proj\.weight", Rule(("inner", "hidden"), summed=1)),
    (r"shared_expert\.down_proj\.weight", Rule(("hidden", "inner"), summed=1)),
    (r"embed_tokens\.weight", Rule(("kept", "hidden"))),
    (r"(lm_head|\.gate|shared_expert_gate)\.weight", Rule(("kept", "hidden"), summed=1)),
    (r"[qk]_norm\.weight", Rule(("kept",))),
    (r"norm\.weight", Rule(("hidden",))),
    (r"[qkv]_proj\.bias", Rule(("heads",))),
    (r"[qkv]_proj\.weight", Rule(("heads", "hidden"), summed=1)),
    (r"o_proj\.weight", Rule(("hidden", "heads"), summed=1)),
)


class WideModel:
    """A widened checkpoint that exists as a recipe: `tensor` makes any of its tensors."""

    def __init__(
        self,
        seed: Path,
        factors: Factors,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        num_layers: int | None = None,
        context_tok: int | None = None,
    ) -> None:
        self.seed, self.dtype, self._factors, self._device = seed, dtype, factors, device
        narrow = json.loads((seed / "config.json").read_text())
        self._head_width: int = narrow.get("head_dim") or narrow["hidden_size"] // narrow["num_attention_heads"]
        self.config = self._wide_config(narrow, num_layers, context_tok)
        self._weights = {
            name: weight.to(device, torch.float32)
            for path in seed.glob("*.safetensors")
            for name, weight in load_file(path).items()
            if layer_of(name) < self.config["num_hidden_layers"]
        }
        self.names = tuple(sorted(self._weights, key=lambda name: (layer_of(name), name)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a wide tensor, without making it."""
        axes = rule_of(name).axes
        return tuple(n * self._times(axis) for n, axis in zip(self._weights[name].shape, axes, strict=True))

    def num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype.itemsize

    def tensor(self, name: str) -> Tensor:
        """The wide tensor, on the device; the same bits on every call on one kind of device."""
        rule, narrow = rule_of(name), self._weights[name]
        wide = narrow
        for dim, axis in enumerate(rule.axes):
            wide = _repeat(wide, dim, self._times(axis), block=self._head_width if axis == "heads" else 1)
        if rule.summed is not None:
            wide = wide / self._times(rule.axes[rule.summed])
        if self.config["tie_word_embeddings"] and name == "model.norm.weight":
            wide = wide / self._factors.hidden  # its output meets the embedding, which is repeated and not divided
        if rule.is_noisy:
            wide = wide.add_(self._cancelling_noise(name, narrow, self._times(rule.axes[-1]), wide.shape))
        return wide.to(self.dtype).contiguous()

    def write_small_files(self, folder: Path) -> None:
        """Config, tokenizer and generation defaults."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        for name in _SMALL_FILES:
            if (self.seed / name).is_file():
                shutil.copy(self.seed / name, folder / name)

    def _times(self, axis: Axis) -> int:
        return 1 if axis == "kept" else getattr(self._factors, axis)

    def _cancelling_noise(self, name: str, narrow: Tensor, times: int, shape: torch.Size) -> Tensor:
        """Noise whose groups of `times` inputs sum to zero; the wide weight gets the variance var(narrow) / times."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        groups = torch.randn(shape[0], shape[1] // times, times, device=self._device, generator=generator)
        groups -= groups.mean(-1, keepdim=True)
        return groups.mul_(narrow.std() / math.sqrt(times)).view(shape)

    def _wide_config(self, narrow: dict[str, Any], num_layers: int | None, context_tok: int | None) -> dict[str, Any]:
        wide = {**narrow, "head_dim": self._head_width, "dtype": str(self.dtype).removeprefix("torch.")}
        for key, axis in _WIDENED_SIZES.items():
            if key in narrow:
                wide[key] = narrow[key] * getattr(self._factors, axis)
        wide["num_hidden_layers"] = min(num_layers or narrow["num_hidden_layers"], narrow["num_hidden_layers"])
        if narrow.get("layer_types"):
            wide["layer_types"] = narrow["layer_types"][: wide["num_hidden_layers"]]
        if context_tok is not None:
            wide["max_position_embeddings"] = context_tok
        return wide


def rule_of(name: str) -> Rule:
    """The first rule whose pattern ends the name. Raises SystemExit for a tensor nobody thought of."""
    for pattern, rule in RULES:
        if re.search(rf"{pattern}$", name):
            return rule
    raise SystemExit(f"No rule widens {name}; add one to RULES.")


def layer_of(name: str) -> int:
    """Decoder layer of a tensor; -1 for those outside the layers."""
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def write_checkpoint(model: WideModel, out: Path) -> int:
    """Write `model` as sharded safetensors; returns its bytes. Shards are written by threads while the next is made."""
    model.write_small_files(out)
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        writes: list[Future[None]] = []
        for number, names in enumerate(_shards(model)):
            if len(writes) >= WRITER_THREADS:  # bounds the shards in memory
                writes.pop(0).result()
            path = out / f"model-{number:05d}.safetensors"
            weight_map.update(dict.fromkeys(names, path.name))
            writes.append(pool.submit(_write_shard, path, [(name, model.tensor(name).cpu()) for name in names]))
        for write in writes:
            write.result()
    total_bytes = sum(map(model.num_bytes, model.names))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total_bytes


def entries_of(model: WideModel, names: tuple[str, ...]) -> list[TensorEntry]:
    """What a safetensors header says about these tensors."""
    return [TensorEntry(name, _DTYPE_NAMES[model.dtype], model.shape(name), 0, model.num_bytes(name)) for name in names]


def _shards(model: WideModel) -> Iterator[list[str]]:
    """Names in order, cut before a shard would pass SHARD_BYTES."""
    shard: list[str] = []
    size_bytes = 0
    for name in model.names:
        if shard and size_bytes + model.num_bytes(name) > SHARD_BYTES:
            yield shard
            shard, size_bytes = [], 0
        shard.append(name)
        size_bytes += model.num_bytes(name)
    yield shard


def _write_shard(path: Path, tensors: list[tuple[str, Tensor]]) -> None:
    entries = [
        TensorEntry(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes) for name, tensor in tensors
    ]
    with path.open("wb", 0) as file:
        file.write(build_header(entries))
        for _, tensor in tensors:
            view = tensor.view(-1).view(torch.uint8).numpy().data
            while view:
                view = view[file.write(view) :]


def _repeat(weight: Tensor, dim: int, times: int, *, block: int) -> Tensor:
    """Repeat every block of `block` neighbours along `dim`, in place of its one."""
    if times == 1:
        return weight
    return weight.unflatten(dim, (-1, block)).repeat_interleave(times, dim).flatten(dim, dim + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=Path, help="folder of the trained seed, such as train_seed.py makes")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="keep only the first N layers")
    parser.add_argument("--context", type=int, help="raise max_position_embeddings; for timing long prompts only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    factors = SHAPES[args.shape].factors
    model = WideModel(args.seed, factors, device=args.device, num_layers=args.layers, context_tok=args.context)
    print(f"{args.out}: {write_checkpoint(model, args.out) / 1e9:.2f} GB, {len(model.names)} tensors")


if __name__ == "__main__":
    main()
