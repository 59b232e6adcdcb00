"""Which checkpoints moespeq takes, judged by `config.json` alone: before anything large is read or
downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moespeq.errors import CheckpointError, UnsupportedModelError
from moespeq.model.families import FAMILIES, REFUSED
from moespeq.model.quantization import Quantization, quantization_of
from moespeq.store.checkpoint import read_small

__all__ = ["check_experts", "check_family", "check_layer_count", "read_quantization"]

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_CONFIG_BYTES = 4 << 20
_MOST_LAYERS = 1_000  # published models have some hundred
_MOST_EXPERTS = 1_000_000  # of all layers; published models have some ten thousand


def check_family(folder: Path) -> None:
    """Raise UnsupportedModelError for a family or quantisation not taken, CheckpointError for no config."""
    config = _read_config(folder / "config.json")
    family = config.get("model_type")
    if not isinstance(family, str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type; download it again.")
    if family not in FAMILIES and _text_family(config) not in FAMILIES:
        raise UnsupportedModelError(
            f"{_why_not(family, config)}; 'moespeq info --families' lists the {len(FAMILIES)} supported families."
        )
    quantization_of(family, config)


def read_quantization(folder: Path) -> Quantization | None:
    """How the weights of a checkpoint are quantised. Raises as `check_family`."""
    config = _read_config(folder / "config.json")
    return quantization_of(str(config.get("model_type")), config)


def check_layer_count(folder: Path, num_tensors: int | None) -> None:
    """Raise CheckpointError for layers whose empty model alone could take hours to build: more than tensors, where
    their number is known, or than any model has.
    """
    config = _read_config(folder / "config.json")
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        num_layers = fields.get("num_hidden_layers")
        if not isinstance(num_layers, int):
            continue
        if num_tensors is not None and num_layers > num_tensors:
            raise CheckpointError(
                f"{folder / 'config.json'} counts {num_layers} layers and the checkpoint holds {num_tensors} tensors; "
                "check that they belong together."
            )
        if num_layers > _MOST_LAYERS:
            raise CheckpointError(
                f"{folder / 'config.json'} counts {num_layers} layers, and moespeq takes {_MOST_LAYERS} at most; "
                "download it again."
            )


def check_experts(num_experts: int, rows: int, cols: int, *, num_layers: int) -> None:
    """Raise CheckpointError for matrices without weights, and for more experts than could ever be listed."""
    if min(rows, cols) < 1:
        raise CheckpointError(f"config.json gives experts a matrix of {rows} x {cols} weights; download it again.")
    if num_layers * num_experts > _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json counts {num_layers} x {num_experts} experts, and moespeq takes {_MOST_EXPERTS} at most; "
            "download it again."
        )


def _text_family(config: Mapping[str, Any]) -> Any:
    """The family of the text's part, where a checkpoint holds a model of images too."""
    text = config.get("text_config")
    return text.get("model_type") if isinstance(text, Mapping) else None


def _why_not(family: str, config: Mapping[str, Any]) -> str:
    if family in REFUSED:
        return f"Model type {family!r} is not supported: {REFUSED[family]}"
    if "auto_map" in config:
        return f"Model type {family!r} runs code from its checkpoint, which moespeq never executes"
    if any(config.get(name) for name in _EXPERT_COUNTS):
        return f"No test proves model type {family!r} yet as one with routed experts"
    if "text_config" in config:
        return f"No test proves model type {family!r} yet"
    return f"Model type {family!r} is dense: it has no routed experts to offload"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_small(path, _MOST_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again.")
    return config
