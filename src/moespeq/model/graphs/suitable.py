"""Whether a model's passes can be graphs, and the reason where they cannot."""

from __future__ import annotations

from collections.abc import Container

from transformers import PreTrainedModel

from moespeq.model.quantizer import experts_modules

__all__ = ["activation_of", "why_not_graphs"]


def activation_of(model: PreTrainedModel) -> str:
    """The name of the experts' activation, as configurations write it."""
    config = model.config.get_text_config()
    return str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", ""))


def why_not_graphs(model: PreTrainedModel, activations: Container[str]) -> str | None:
    """None when kernels that fuse `activations` know the experts' arithmetic, and the attention is torch's own."""
    for _, module in experts_modules(model):
        if module.has_bias:
            return "its experts have biases"
        if type(module)._apply_gate.__qualname__ != "_default_apply_gate":  # type: ignore[attr-defined]
            return "its experts have a gate of their own"
    if activation_of(model) not in activations:
        return f"no kernel computes its activation '{activation_of(model)}'"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is '{model.config._attn_implementation}'"
    return None
