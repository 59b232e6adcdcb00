"""Tiny checkpoints that read images, with the files of their processors, in the layout of the hub; and tiny images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast

from families import make_tiny, tiny_tokenizer
from family_configs import VOCAB_SIZE

__all__ = ["IMAGE_FAMILIES", "make_reader", "pixels", "png"]

_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
# Names of the tokens around an image's, by what the family's processor and configuration call them.
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_GEMMA = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
_QWEN_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 4,
    "temporal_patch_size": 1,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 8192},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_GEMMA_PIXELS = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 3,
    "image_seq_length": 70,
}
_FILES: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "qwen3_vl_moe": (_QWEN, _QWEN_PIXELS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_5_moe": (_QWEN, _QWEN_PIXELS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma4": (_GEMMA, _GEMMA_PIXELS, "<|image|>"),
}
# Of families whose configuration has none unless told.
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "position_embedding_size": 256,
        }
    }
}
IMAGE_FAMILIES = tuple(_FILES)


def make_reader(family: str, folder: Path, **overrides: Any) -> Path:
    """Write a random model of `family` that reads images, with tokenizer and processor, into `folder`."""
    names, pixel_settings, written = _FILES[family]
    ids = {f"{name}_id": VOCAB_SIZE + place for place, name in enumerate(names)}
    tower = _TOWERS.get(family, {})
    make_tiny(family, folder, wrapper={**ids, **tower}, vocab_size=VOCAB_SIZE + len(names), **overrides)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer()._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=names,
    )
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", written)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(pixel_settings))
    return folder


def pixels(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """A random image."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(seed: int, width: int = 40, height: int = 24) -> bytes:
    """The same as the bytes of a file."""
    file = io.BytesIO()
    pixels(seed, width, height).save(file, "PNG")
    return file.getvalue()
