"""Fewer launches: the decoder's modules rewritten and through torch.compile, once for each number of rows.

Launches are the floor of a small pass: transformers' layers issue 41-55 kernels each. All layers share one compiled
function, because what tells them apart (weights) are its arguments, and all operators are opaque to it.
`deterministic` keeps the compiler from choosing a reduction by timing it: the same machine must give the same bits in
every process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import PreTrainedModel

from moespeq.model.graphs import small_ops
from moespeq.model.graphs.rewrite import rewrite
from moespeq.model.rotation import looks_at_positions

__all__ = ["compile_layers", "compiled_layers", "eager_layers", "release_layers"]

_MOST_SHAPES = 256  # numbers of rows and lengths of contexts, over all engines of a process
_LAYERS = threading.RLock()


def compile_layers(model: PreTrainedModel) -> None:
    """Mark layers, last norm and rotation to be compiled at their first call with a new number of rows."""
    torch._inductor.config.deterministic = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    small_ops.register()
    for module in _compiled_modules(model):
        is_layer = module in model.get_decoder().layers
        module.compile(backend=_rewrite_and_compile, fullgraph=is_layer, dynamic=False)


def release_layers(model: PreTrainedModel) -> None:
    """Let the layers' memory go with the last reference to the model: a compiled module holds itself."""
    for module in _compiled_modules(model):
        module._compiled_call_impl = None


def _compiled_modules(model: PreTrainedModel) -> list[nn.Module]:
    decoder = model.get_decoder()
    small = [getattr(decoder, name) for name in ("norm", "rotary_emb") if hasattr(decoder, name)]
    if looks_at_positions(model.config.get_text_config()):
        small = []  # such a rotation looks at the positions' values
    return [*decoder.layers, *small]


@contextmanager
def eager_layers() -> Iterator[None]:
    """Run compiled layers as they were written: a prefill has a new number of rows each time.

    Whether layers run compiled is said to the whole process, so only one thread at a time runs them.
    """
    with _LAYERS, torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def compiled_layers() -> Iterator[None]:
    """Run them compiled, whatever other engines do in other threads."""
    with _LAYERS:
        yield


def _rewrite_and_compile(module: GraphModule, inputs: Sequence[Tensor]) -> Any:
    from torch._inductor.compile_fx import compile_fx

    rewrite(module.graph)
    module.recompile()
    return compile_fx(module, inputs)
