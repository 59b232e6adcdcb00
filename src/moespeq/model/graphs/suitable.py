"""Whether a model's passes can be graphs, and the reason where they cannot."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig, PreTrainedModel

from moespeq.kernels.fused import FUSED_ACTIVATIONS
from moespeq.model.empty import empty_model
from moespeq.model.families import FAMILIES
from moespeq.model.quantizer import experts_modules
from moespeq.model.rotation import looks_at_positions
from moespeq.nested import Layout

__all__ = ["activation_of", "passes_on_cuda", "why_not_graphs", "why_not_kernels"]

_ROTATIONS_ON_THE_HOST = frozenset({"phimoe"})  # it makes its frequencies on the CPU, in every call


def activation_of(model: PreTrainedModel) -> str:
    """The name of the experts' activation, as configurations write it."""
    config = model.config.get_text_config()
    return str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", ""))


def why_not_graphs(model: PreTrainedModel) -> str | None:
    """None when the kernels know the experts' arithmetic, and the attention is torch's own."""
    for _, module in experts_modules(model):
        if module.has_bias:
            return "its experts have biases"
        if type(module)._apply_gate.__qualname__ != "_default_apply_gate":  # type: ignore[attr-defined]
            return "its experts have a gate of their own"
    config = model.config.get_text_config()
    if FAMILIES[config.model_type].mixer is not None:
        return "it has layers with a state, which take one row at a time"
    if looks_at_positions(config) or config.model_type in _ROTATIONS_ON_THE_HOST:
        return "its rotary embedding depends on the positions' values"
    if not FAMILIES[config.model_type].has_graphs:
        return f"no test on a GPU proves graphs of {config.model_type} yet"
    if activation_of(model) not in FUSED_ACTIVATIONS:
        return f"no kernel computes its activation '{activation_of(model)}'"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is '{model.config._attn_implementation}'"
    return None


def why_not_kernels(layouts: Iterable[Layout]) -> str | None:
    """None where kernels read every record; others are decoded by torch, into a copy that is written and read."""
    layout = next((layout for layout in layouts if not layout.is_bf16), None)
    return None if layout is None else f"no kernel reads {layout.value} records yet, torch decodes each in every pass"


def passes_on_cuda(config: PreTrainedConfig, layouts: Iterable[Layout]) -> str:
    """How draft and verify of such a model run on a GPU, for people; nothing is loaded."""
    reason = why_not_graphs(empty_model(config)) or why_not_kernels(layouts)
    return "CUDA graphs" if reason is None else f"eager: {reason}"
