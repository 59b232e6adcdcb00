"""A transformers model with everything but its routed experts, and its description for planning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from moespeq.errors import CheckpointError, StoreError
from moespeq.model import experts, quantizer
from moespeq.model.cache_size import CacheSize, cache_size
from moespeq.model.empty import empty_model
from moespeq.model.one_piece import move_in_one_piece
from moespeq.model.vision import describe_vision
from moespeq.nested import Layout
from moespeq.types import ModelShape

__all__ = [
    "compute_dtype",
    "describe",
    "load_config",
    "load_generation_config",
    "load_without_experts",
    "one_line",
]

_SHOWN_CHARS = 300  # of an error's text, which may repeat a value of any length


def load_config(folder: Path) -> PreTrainedConfig:
    """The model's configuration, without a `quantization_config`: it would win over our own quantizer."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # The checks of single fields raise whatever their values break.
        raise CheckpointError(f"{folder / 'config.json'} is not a model configuration: {one_line(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def load_generation_config(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """`generation_config.json` where there is one, else what `config.json` says of generation, as in transformers.

    Where the file names no end of a text, the model's configuration does: in transformers such a text has none.
    """
    path = folder / "generation_config.json"
    implied = _implied_generation_config(folder, config)
    if not path.is_file():
        return implied
    try:
        own = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # A value of the wrong type breaks whichever check meets it first.
        raise CheckpointError(f"{path} cannot be read ({one_line(error)}); download or prepare it again.") from error
    if own.eos_token_id is None:
        own.eos_token_id = implied.eos_token_id
    return own


def _implied_generation_config(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """From the file, since `config` has lost settings of generation; what that does not say, `config` may."""
    known = GenerationConfig.from_model_config(config)
    if not (folder / "config.json").is_file():
        return known
    try:
        written = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
    except Exception as error:
        raise CheckpointError(
            f"{folder / 'config.json'} says nonsense of generation: {one_line(error)}; download it again."
        ) from error
    if written.eos_token_id is None:
        written.eos_token_id = known.eos_token_id
    return written


def one_line(error: Exception) -> str:
    """The first line of an error's text, and the next where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."


def compute_dtype(config: PreTrainedConfig, layouts: Sequence[Layout]) -> torch.dtype:
    """What dense weights and products are computed in: bf16; of fp16 experts fp16, as in transformers, which goes by
    the configuration's dtype where it names one of the two.
    """
    if Layout.FP16 not in layouts or config.get_text_config().dtype is torch.bfloat16:
        return torch.bfloat16
    return torch.float16


def load_without_experts(
    config: PreTrainedConfig,
    dense: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str = "cpu",
) -> PreTrainedModel:
    """The model of `config` with `dense` (source names) as its weights; its experts modules hold no matrices.

    Raises StoreError when a weight of the model is in neither the dense tensors nor the experts.
    """
    quantizer.register()
    experts.register()
    empty = empty_model(config)
    with _quiet():
        model, info = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=dict(dense),
            dtype=dtype,
            quantization_config=quantizer.ExpertsElsewhereConfig(),
            experts_implementation=experts.IMPLEMENTATION,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise StoreError(
            f"The store lacks {len(missing)} weights of the model, first '{missing[0]}'; prepare it again."
        )
    model.eval().requires_grad_(False)
    return model if device == "cpu" else move_in_one_piece(model, device)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bar, and no report of tensors that the class ignores: what is missing we check ourselves."""
    had_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bar:
            logging.enable_progress_bar()


def _cache_size(config: PreTrainedConfig) -> CacheSize:
    try:
        return cache_size(config)
    except Exception as error:  # A model that was built may still fail anywhere in its forward.
        raise CheckpointError(f"config.json describes no model that can run: {one_line(error)}") from error


def describe(
    config: PreTrainedConfig,
    *,
    num_moe_layers: int,
    num_experts: int,
    top_k: int,
    matrices: list[tuple[str, int, int]],
) -> ModelShape:
    """What `plan` needs to know of a model. Raises CheckpointError for a context or shapes that cannot be."""
    text = config.get_text_config()
    if text.max_position_embeddings < 1:
        raise CheckpointError(
            f"config.json gives a context of {text.max_position_embeddings} tokens; max_position_embeddings must be at "
            "least 1."
        )
    size = _cache_size(config)
    return ModelShape(
        model_type=config.model_type,
        num_layers=text.num_hidden_layers,
        num_moe_layers=num_moe_layers,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_context_tok=text.max_position_embeddings,
        matrices=tuple(matrices),
        kv_bytes_per_tok=size.kv_bytes,
        state_bytes=size.state_bytes,
        vision=describe_vision(config),
    )
