"""Tiny random checkpoints of every supported family, saved in the layout their hub checkpoints use.

What is a family, and how its tensors are named, comes from transformers.
Every model has a few layers, at least eight experts and top-k of at least two, so that routing, residency and
prefetch all have something to do; weights are wide enough that greedy tokens differ from position to
position.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from family_configs import COMMON, SPECIFIC, VISION, VOCAB_SIZE, WRAPPED

__all__ = ["FAMILIES", "ON_A_GPU", "TEXT_FAMILIES", "auto_class", "make_tiny", "tiny_config", "tiny_tokenizer"]

TEXT_FAMILIES, FAMILIES = tuple(SPECIFIC), (*SPECIFIC, *WRAPPED)
# Those with graphs, and one of each kind that runs eagerly there: biases, a rotation of its own, layers with a state.
ON_A_GPU = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "phimoe",
    "qwen3_next",
)

_SENTENCES = (
    "A router sends every token to a few experts, and the others sleep.",
    "What a draft predicts, the link can bring before it is needed.",
    "The quick brown fox jumps over the lazy dog, twice a day.",
    "def add(first, second):\n    return first + second\n",
    "Q: How many apples are left? A: There are 12 - 5 = 7 apples left.",
)
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@lru_cache(maxsize=1)
def _trained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text into ids below VOCAB_SIZE, with a chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained_tokenizer(), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def tiny_config(family: str, *, wrapper: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """The family's config at test size; `overrides` win, in the text's part where there is one of images too, and
    `wrapper` in what is around both.
    """
    if family in WRAPPED:
        config_class = type(AutoConfig.for_model(family))
        usual = config_class().vision_config
        vision = None if usual is None else {name: VISION[name] for name in VISION.keys() & usual.to_dict().keys()}
        text = {**COMMON, **WRAPPED[family], **overrides}
        return config_class(**{"text_config": text, "vision_config": vision, **(wrapper or {})})
    return AutoConfig.for_model(family, **{**COMMON, **SPECIFIC[family], **overrides})


def auto_class(config: Any) -> Any:
    """What transformers makes a model of `config` by, the images' part with it."""
    is_wrapped = config.model_type in WRAPPED
    return AutoModelForImageTextToText if is_wrapped else AutoModelForCausalLM


def make_tiny(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard_size: int | str = "64KB",
    **overrides: Any,
) -> Path:
    """Write a random model of `family` and its tokenizer into `folder` in the hub layout; returns `folder`.

    The default shard size puts one expert's matrices into different files; a large one gives a single file.
    """
    model = _random_model(tiny_config(family, **overrides), seed, dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _random_model(config: Any, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Zero biases and all-one norms would hide a tensor that went to the wrong place.
            if name.endswith(("bias", "biases", "norm.weight", "sinks", "temp")) or "layernorm" in name:
                tensor.data.add_(0.05 * torch.randn_like(tensor))
            elif name.endswith("tid2eid"):  # the experts of every token, by a table
                tensor.data = torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : tensor.shape[1]]
        _keep_router_bias_in_fp32(model)
    model.generation_config.do_sample = False
    return model


def _keep_router_bias_in_fp32(model: PreTrainedModel) -> None:
    # Hub checkpoints of this family store the load-balancing bias in fp32 beside bf16 weights.
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias.data = bias.float() + 0.01 * torch.randn(bias.shape)
