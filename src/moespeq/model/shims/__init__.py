"""Modules of ours in the place of what a family's own code does otherwise than we need.

Mostly experts that are computed without transformers' experts interface: a shim keeps what is dense there (router,
shared expert) and asks our experts function for the rest. Where a checkpoint's tensors are not the shim's matrices,
converters in the form of transformers' own say which is which. A shim stands in one instance of a model; transformers'
classes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from moespeq.model.shims.dbrx import DbrxShim, StackedExperts, dbrx_converters
from moespeq.model.shims.deepseek_v4 import DeepseekV4NormShim
from moespeq.model.shims.llama4 import Llama4Shim
from moespeq.model.shims.step3p7 import Step3p7Shim

__all__ = ["SHIMS", "StackedExperts", "converters_of", "install"]


@dataclass(frozen=True, slots=True)
class Shim:
    """replaces: the class that `module`, called with one of its instances, takes the place of."""

    replaces: str
    module: Callable[..., nn.Module]
    converters: Callable[[], list[WeightConverter]] = list


SHIMS: Mapping[str, Shim] = MappingProxyType(
    {
        "dbrx": Shim("DbrxExperts", DbrxShim, dbrx_converters),
        "deepseek_v4": Shim("DeepseekV4RMSNorm", DeepseekV4NormShim),
        "llama4_text": Shim("Llama4TextMoe", Llama4Shim),
        "step3p5": Shim("Step3p7Experts", Step3p7Shim),
    }
)


def install(model: PreTrainedModel) -> None:
    """Put the shim of the model's family, if it has one, in place; doing it again changes nothing."""
    shim = _shim_of(model)
    if shim is None:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == shim.replaces:
                setattr(parent, name, shim.module(child))


def converters_of(model: PreTrainedModel) -> list[WeightConverter]:
    """What transformers' own conversion mapping does not say of the model's experts."""
    shim = _shim_of(model)
    return [] if shim is None else shim.converters()


def _shim_of(model: PreTrainedModel) -> Shim | None:
    return SHIMS.get(model.config.get_text_config().model_type)
