"""Root mean square norms of one row, as transformers' modules spell them, with the addition that makes their input.

wide = x.to(float32); weight * (wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moespeq.model.graphs.fx_nodes import (
    argument,
    is_contiguous_input,
    is_one_row,
    replace,
    through_aliases,
    value_of,
    written_nodes,
)

__all__ = ["replace_norms"]


@dataclass(frozen=True, slots=True)
class _Norm:
    """`result` is the norm of `x` with `weight`."""

    result: Node
    x: Node
    weight: Node
    eps: float


def replace_norms(graph: Graph) -> int:
    """Returns how many were replaced."""
    written = written_nodes(graph)
    norms = [norm for node in graph.nodes if (norm := _norm_of(node)) and through_aliases(norm.x) not in written]
    for norm in norms:
        if _is_residual_sum(norm.x):
            _replace_with_addition(graph, norm)
        else:
            with graph.inserting_before(norm.result):
                normed = graph.call_function(torch.ops.moespeq.rms_norm.default, (norm.x, norm.weight, norm.eps))
            replace(graph, norm.result, normed)
    return len(norms)


def _replace_with_addition(graph: Graph, norm: _Norm) -> None:
    with graph.inserting_before(norm.x):
        both = graph.call_function(torch.ops.moespeq.add_rms_norm.default, (*norm.x.args, norm.weight, norm.eps))
        total, normed = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
    replace(graph, norm.result, normed)
    replace(graph, norm.x, total)


def _is_residual_sum(x: Node) -> bool:
    if x.target is not operator.add or x.kwargs or not all(isinstance(term, Node) for term in x.args):
        return False
    here = value_of(x)
    terms = [value_of(term) for term in x.args]
    return here is not None and all(t is not None and (t.shape, t.dtype) == (here.shape, here.dtype) for t in terms)


def _norm_of(node: Node) -> _Norm | None:
    """The norm whose last operation `node` is."""
    if node.target is not operator.mul or not is_one_row(node):
        return None
    weight = next((factor for factor in node.args if is_contiguous_input(factor)), None)
    narrow = next((factor for factor in node.args if _is_call(factor, "to")), None)
    scaled = argument(narrow, 0) if narrow is not None else None
    wide, root = (argument(scaled, 0), argument(scaled, 1)) if _is_call(scaled, operator.mul) else (None, None)
    if weight is None or not (_is_call(wide, "to") and _is_call(root, torch.rsqrt)):
        return None
    x, eps = argument(wide, 0), _eps_of(argument(root, 0), wide)
    is_wide = value_of(wide).dtype == torch.float32 and is_one_row(x)
    if eps is None or not is_wide or value_of(weight).shape != value_of(x).shape[-1:]:
        return None
    dtypes = {value_of(each).dtype for each in (x, weight, narrow, node)}
    return _Norm(node, x, weight, eps) if len(dtypes) == 1 else None  # type: ignore[arg-type]


def _eps_of(shifted: Any, wide: Any) -> float | None:
    """eps, when `shifted` is the mean of the squares of `wide`, plus eps."""
    if not (_is_call(shifted, operator.add) and isinstance(argument(shifted, 1), float)):
        return None
    mean = argument(shifted, 0)
    if not (_is_call(mean, "mean") and argument(mean, 1, "dim") == -1 and argument(mean, 2, "keepdim", False)):
        return None
    square = argument(mean, 0)
    is_square = _is_call(square, "pow") and square.args == (wide, 2)
    return float(argument(shifted, 1)) if is_square else None


def _is_call(node: Any, *targets: object) -> bool:
    return isinstance(node, Node) and node.target in targets
