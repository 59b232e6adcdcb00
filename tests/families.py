"""Tiny random checkpoints of every supported family, saved in the layout their hub checkpoints use.

Owns the sizes and nothing else: what is a family, and how its tensors are named, comes from transformers.
Every model has a few layers, at least eight experts and top-k of at least two, so that routing, residency and
prefetch all have something to do; weights are wide enough that greedy tokens differ from position to
position.

    hidden 64, intermediate 48 (routed), 3-4 layers, 8-16 experts, vocabulary 320
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["FAMILIES", "make_tiny", "tiny_config", "tiny_tokenizer"]

VOCAB_SIZE = 320
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
}
_SPECIFIC: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "num_experts": 12,
        "num_experts_per_tok": 4,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "phimoe": {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "deepseek_v2": {**_LATENT_ATTENTION, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_LATENT_ATTENTION, "n_group": 4, "topk_group": 2, "num_mtp_layers": 1},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
FAMILIES = tuple(_SPECIFIC)

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


def tiny_config(family: str, **overrides: Any) -> Any:
    """The family's config at test size; `overrides` win."""
    return AutoConfig.for_model(family, **{**_COMMON, **_SPECIFIC[family], **overrides})


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
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Zero biases and all-one norms would hide a tensor that went to the wrong place.
            if name.endswith(("bias", "norm.weight", "sinks")) or "layernorm" in name:
                tensor.data.add_(0.05 * torch.randn_like(tensor))
        _keep_router_bias_in_fp32(model)
    model.generation_config.do_sample = False
    return model


def _keep_router_bias_in_fp32(model: PreTrainedModel) -> None:
    # Hub checkpoints of this family store the load-balancing bias in fp32 beside bf16 weights.
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            module.e_score_correction_bias = (bias.float() + 0.01 * torch.randn(bias.shape)).to(torch.float32)
