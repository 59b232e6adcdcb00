"""Tiny checkpoints of codes and scales in the layouts of the hub: FP8 in blocks as DeepSeek-V3's and Qwen3's, MXFP4 as
GPT-OSS's. Each is made of a bf16 one, whose linear maps or experts are quantised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["edit_config", "to_fp8", "to_mxfp4"]

_FP8_MAX = 448.0
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_fp8(folder: Path, *, block: tuple[int, int] = (16, 16), scales: torch.dtype = torch.float32) -> Path:
    """Quantise every linear map of a single-file checkpoint but routers and the head, and write it as two files.

    A weight and its scales are in different files where its name is early.
    """
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
        codes, grid = _fp8(tensors[name], block)
        grid = _power_of_two(grid) if scales is torch.float8_e8m0fnu else grid
        tensors[name], tensors[f"{name}_scale_inv"] = codes, grid.to(scales)
    names = sorted(tensors)
    _write(folder, tensors, {name: 1 + (i >= len(names) // 2 or name.endswith("inv")) for i, name in enumerate(names)})
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    edit_config(folder, quantization_config=quantization)
    return folder


def to_mxfp4(folder: Path) -> Path:
    """Quantise the experts of a single-file GPT-OSS checkpoint, whose matrices lie as [in, out]."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = _mxfp4(tensors.pop(name).transpose(1, 2).float())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    _write(folder, tensors, {name: 1 + (i % 2) for i, name in enumerate(sorted(tensors))})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    """Set fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes e4m3 [R, C] and scales float32, one a block."""
    rows, cols = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -cols % block[1], 0, -rows % block[0]))
    blocks = wide.view(wide.shape[0] // block[0], block[0], -1, block[1])
    grid = blocks.abs().amax((1, 3)).clamp_min(1e-6) / _FP8_MAX
    codes = (blocks / grid[:, None, :, None]).clamp(-_FP8_MAX, _FP8_MAX).view(wide.shape)[:rows, :cols]
    return codes.contiguous().to(torch.float8_e4m3fn), grid


def _power_of_two(grid: torch.Tensor) -> torch.Tensor:
    return torch.exp2(grid.log2().ceil())


def _mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks uint8 [E, R, C / 32, 16] and scales uint8 [E, R, C / 32] of [E, R, C]."""
    groups = weights.view(*weights.shape[:2], -1, 32)
    exponents = (groups.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    nearest = (scaled.abs().unsqueeze(-1) - _FP4).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def _write(folder: Path, tensors: dict[str, torch.Tensor], files: dict[str, int]) -> None:
    (folder / "model.safetensors").unlink()
    names = {1: "model-00001-of-00002.safetensors", 2: "model-00002-of-00002.safetensors"}
    for number, file in names.items():
        part = {name: tensors[name].contiguous() for name in tensors if files[name] == number}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": {name: names[files[name]] for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
