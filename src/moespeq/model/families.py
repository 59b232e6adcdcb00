"""The families of mixture-of-experts models that moespeq takes, and what their code does that no configuration says.

A family is here when the tests of tests/families.py hold for it: stored and exported bit for bit, logits equal to
transformers' own, speculative text equal to plain text. One line here and a tiny configuration there add one. Those
whose images are taken too are in a table of their own, tested in tests/golden/test_images.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

__all__ = [
    "FAMILIES",
    "REFUSED",
    "VISION",
    "Family",
    "MaskForm",
    "Vision",
    "describe_families",
    "tell_families",
    "why_not_traced",
]


class MaskForm(Enum):
    """In which form a model's forward takes ready masks."""

    ONE = "one for all layers, no window"
    WINDOWED = "one for all layers, with the configuration's window if it has one"
    BY_LAYER_TYPE = "a mapping, a mask for each type of layer"


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a `model_type` beside its configuration.

    mixer: class of its layers with a state, instead of keys and values or beside them. continues: such a mixer may be
    given several rows behind others. top_k: what its configuration calls the number
    of experts of a token. has_graphs: its passes were proven as graphs on a GPU; others run eagerly there. has_blocks:
    router and experts are a module of their own, which takes hidden states alone. has_shim: a part of its code is
    replaced by one of ours.
    """

    masks: MaskForm = MaskForm.ONE
    mixer: str | None = None
    continues: bool = True
    top_k: str = "num_experts_per_tok"
    has_graphs: bool = False
    has_blocks: bool = True
    has_shim: bool = False


_PLAIN, _BY_TYPE = Family(), Family(MaskForm.BY_LAYER_TYPE)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "afmoe": _BY_TYPE,
        "axk1": _PLAIN,
        "axk2": _BY_TYPE,
        "cohere2_moe": _BY_TYPE,
        "dbrx": Family(top_k="ffn_config.moe_top_k", has_shim=True),
        "deepseek_ocr2_text": _PLAIN,
        "deepseek_v2": Family(has_graphs=True),
        "deepseek_v3": Family(has_graphs=True),
        "deepseek_v32": _BY_TYPE,
        "deepseek_v4": Family(MaskForm.WINDOWED, has_blocks=False, has_shim=True),
        "dots1": _BY_TYPE,
        "ernie4_5_moe": _PLAIN,
        "exaone_moe": _BY_TYPE,
        "flex_olmo": _PLAIN,
        "gemma4_text": Family(MaskForm.BY_LAYER_TYPE, top_k="top_k_experts", has_blocks=False),
        "glm4_moe": _PLAIN,
        "glm4_moe_lite": _PLAIN,
        "glm4v_moe_text": _PLAIN,
        "glm_moe_dsa": _BY_TYPE,
        "gpt_oss": _BY_TYPE,
        "granitemoe": _PLAIN,
        "granitemoe_swa": _BY_TYPE,
        "granitemoehybrid": Family(MaskForm.BY_LAYER_TYPE, mixer="GraniteMoeHybridMambaLayer"),
        "granitemoeshared": _PLAIN,
        "hunyuan_v1_moe": _PLAIN,
        "hy_v3": _PLAIN,
        "hy_v4": _BY_TYPE,
        "jamba": Family(MaskForm.BY_LAYER_TYPE, mixer="JambaMambaMixer", continues=False),
        "kimi_linear": Family(MaskForm.BY_LAYER_TYPE, mixer="KimiLinearDeltaAttention", top_k="num_experts_per_token"),
        "laguna": _BY_TYPE,
        "lfm2_moe": Family(MaskForm.BY_LAYER_TYPE, mixer="Lfm2MoeShortConv"),
        "llama4_text": Family(MaskForm.BY_LAYER_TYPE, has_shim=True),
        "mellum": _BY_TYPE,
        "mimo_v2_flash": _BY_TYPE,
        "minimax": Family(MaskForm.BY_LAYER_TYPE, mixer="MiniMaxLightningAttention"),
        "minimax_m2": _PLAIN,
        "mixtral": Family(MaskForm.WINDOWED, has_graphs=True),
        "nemotron_h": Family(MaskForm.BY_LAYER_TYPE, mixer="NemotronHMamba2Mixer"),
        "olmoe": Family(has_graphs=True),
        "phimoe": Family(MaskForm.WINDOWED),
        "qwen2_moe": Family(MaskForm.BY_LAYER_TYPE, has_graphs=True),
        "qwen3_5_moe_text": Family(MaskForm.BY_LAYER_TYPE, mixer="Qwen3_5MoeGatedDeltaNet"),
        "qwen3_vl_moe_text": _PLAIN,
        "minimax_m3_vl_text": _BY_TYPE,
        "mistral4": _PLAIN,
        "qwen3_moe": Family(MaskForm.WINDOWED, has_graphs=True),
        "qwen3_next": Family(MaskForm.BY_LAYER_TYPE, mixer="Qwen3NextGatedDeltaNet"),
        "solar_open": _PLAIN,
        "step3p5": Family(MaskForm.BY_LAYER_TYPE, has_shim=True),
        "zaya": Family(MaskForm.BY_LAYER_TYPE, mixer="ZayaCCAProjection", has_blocks=False),
    }
)


@dataclass(frozen=True, slots=True)
class Vision:
    """processor: transformers' image processor that needs Pillow alone. before, after: settings of config.json that
    name the tokens around an image where no chat template writes them. merged: the setting of the tower that says how
    many patches, squared, become a token.
    """

    processor: str
    merged: str = "spatial_merge_size"
    before: str | None = None
    after: str | None = None


_QWEN = Vision("Qwen2VLImageProcessorPil")

VISION: Mapping[str, Vision] = MappingProxyType(
    {
        "gemma4": Vision(
            "Gemma4ImageProcessorPil", merged="pooling_kernel_size", before="boi_token_id", after="eoi_token_id"
        ),
        "qwen3_5_moe": _QWEN,
        "qwen3_vl_moe": _QWEN,
    }
)
"""By the model_type around the text's."""

_NO_INTERFACE = "its code computes experts by itself, not through transformers' experts interface"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "aria": _NO_INTERFACE,
        "ernie4_5_vl_moe": "its checkpoints mix the experts of text and of images in one tensor",
        "diffusion_gemma": "it denoises blocks of text, so there is no next token to draft",
        "glm5_next": "its sparse attention pools positions, by a mask of another form",
        "inkling": "its checkpoints interleave the rows of gate and up, and no test proves that layout yet",
        "jetmoe": _NO_INTERFACE,
        "longcat_flash": "transformers' class wants weights of the experts that have none, so it loads no checkpoint",
        "openai_privacy_filter": "it labels tokens and generates none",
        "qwen3_omni_moe": "its checkpoints hold a model that hears and speaks too, and no test proves that yet",
        "qwen4_exp": "its embedding of several tokens has states of its own, and no test proves them yet",
    }
)
"""Families with routed experts that are not taken, and why."""


def describe_families() -> list[dict[str, str | bool | None]]:
    """Every family with routed experts by name: whether it is taken, with images, and why not."""
    return [
        {
            "name": name,
            "supported": name in FAMILIES or f"{name}_text" in FAMILIES,
            "images": name in VISION,
            "reason": REFUSED.get(name),
        }
        for name in sorted({name.removesuffix("_text") for name in (*FAMILIES, *REFUSED)})
    ]


def tell_families() -> list[tuple[str, str]]:
    """The same for people, supported ones first: a name, and what there is to say."""
    told = []
    for entry in sorted(describe_families(), key=lambda entry: not entry["supported"]):
        name = str(entry["name"])
        family = FAMILIES.get(name) or FAMILIES.get(f"{name}_text")
        notes = [", with a shim of ours"] if family is not None and family.has_shim else []
        notes += [", with images"] if entry["images"] else []
        told.append((name, str(entry["reason"] or "".join(["supported", *notes]))))
    return told


def why_not_traced(model_type: str) -> str | None:
    """Why no routing trace is recorded of a supported family; None where one is."""
    if FAMILIES[model_type].mixer is not None:
        return "layers with a state cannot look at a text's rows again"
    if not FAMILIES[model_type].has_blocks:
        return "its routers cannot be asked alone"
    return None
