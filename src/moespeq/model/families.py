"""The families of mixture-of-experts models that moespeq takes, and what their code does that no configuration says.

A family is here when the tests of tests/families.py hold for it: stored and exported bit for bit, logits equal to
transformers' own, speculative text equal to plain text. One line here and a tiny configuration there add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

__all__ = ["FAMILIES", "Family", "MaskForm"]


class MaskForm(Enum):
    """In which form a model's forward takes ready masks."""

    ONE = "one for all layers, no window"
    WINDOWED = "one for all layers, with the configuration's window if it has one"
    BY_LAYER_TYPE = "a mapping, a mask for each type of layer"


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a `model_type` beside its configuration.

    mixer: class of its layers with a state instead of keys and values. top_k: what its configuration calls the number
    of experts of a token. has_graphs: its passes were proven as graphs on a GPU; others run eagerly there.
    """

    masks: MaskForm = MaskForm.ONE
    mixer: str | None = None
    top_k: str = "num_experts_per_tok"
    has_graphs: bool = False


_PLAIN, _BY_TYPE = Family(), Family(MaskForm.BY_LAYER_TYPE)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "afmoe": _BY_TYPE,
        "axk1": _PLAIN,
        "axk2": _BY_TYPE,
        "cohere2_moe": _BY_TYPE,
        "deepseek_v2": Family(has_graphs=True),
        "deepseek_v3": Family(has_graphs=True),
        "deepseek_v32": _BY_TYPE,
        "dots1": _BY_TYPE,
        "ernie4_5_moe": _PLAIN,
        "exaone_moe": _BY_TYPE,
        "flex_olmo": _PLAIN,
        "gemma4_text": Family(MaskForm.BY_LAYER_TYPE, top_k="top_k_experts"),
        "glm4_moe": _PLAIN,
        "glm4_moe_lite": _PLAIN,
        "glm_moe_dsa": _BY_TYPE,
        "gpt_oss": _BY_TYPE,
        "granitemoe": _PLAIN,
        "granitemoe_swa": _BY_TYPE,
        "granitemoehybrid": Family(MaskForm.BY_LAYER_TYPE, mixer="GraniteMoeHybridMambaLayer"),
        "granitemoeshared": _PLAIN,
        "hunyuan_v1_moe": _PLAIN,
        "hy_v3": _PLAIN,
        "hy_v4": _BY_TYPE,
        "kimi_linear": Family(MaskForm.BY_LAYER_TYPE, mixer="KimiLinearDeltaAttention", top_k="num_experts_per_token"),
        "laguna": _BY_TYPE,
        "lfm2_moe": Family(MaskForm.BY_LAYER_TYPE, mixer="Lfm2MoeShortConv"),
        "mellum": _BY_TYPE,
        "mimo_v2_flash": _BY_TYPE,
        "minimax_m2": _PLAIN,
        "mixtral": Family(MaskForm.WINDOWED, has_graphs=True),
        "nemotron_h": Family(MaskForm.BY_LAYER_TYPE, mixer="NemotronHMamba2Mixer"),
        "olmoe": Family(has_graphs=True),
        "phimoe": Family(MaskForm.WINDOWED),
        "qwen2_moe": Family(MaskForm.BY_LAYER_TYPE, has_graphs=True),
        "qwen3_5_moe_text": Family(MaskForm.BY_LAYER_TYPE, mixer="Qwen3_5MoeGatedDeltaNet"),
        "qwen3_moe": Family(MaskForm.WINDOWED, has_graphs=True),
        "qwen3_next": Family(MaskForm.BY_LAYER_TYPE, mixer="Qwen3NextGatedDeltaNet"),
        "solar_open": _PLAIN,
    }
)
