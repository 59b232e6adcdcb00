"""Top-k of few columns as one operator.

With the softmax before it, the division of the values by their sum and their cast after it, where nothing else reads
what lies between.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from moespeq.model.graphs.fx_nodes import FLOATS, argument, only_user, replace, through_casts, value_of

__all__ = ["replace_topk"]

_MOST_COLS, _MOST_K = 1024, 32


@dataclass(frozen=True, slots=True)
class _Results:
    """What follows a top-k: `values` ends the chain of nodes that make them; `dead` are the others of the chain."""

    values: Node
    indices: list[Node]
    dead: list[Node]
    is_normalized: bool


def replace_topk(graph: Graph) -> int:
    """Returns how many were replaced."""
    found = [node for node in graph.nodes if _is_topk(node)]
    for node in found:
        scores, k = argument(node, 0, "input"), argument(node, 1, "k")
        logits = _softmaxed(scores)
        results = _results_of(node)
        if logits is None or results is None:
            with graph.inserting_before(node):
                replace(graph, node, graph.call_function(torch.ops.moespeq.topk.default, (scores, k)))
        else:
            _replace_with_softmax(graph, node, (logits, k), results)
    return len(found)


def _is_topk(node: Node) -> bool:
    """Whether the operator can do it: few columns of the last dimension, the largest ones, both results by index."""
    if node.target not in ("topk", torch.topk) or "out" in node.kwargs:
        return False
    scores, k = value_of(argument(node, 0, "input")), argument(node, 1, "k")
    if scores is None or scores.dtype not in FLOATS or not isinstance(k, int) or k > _MOST_K:
        return False
    is_last = argument(node, 2, "dim", -1) in (-1, scores.dim() - 1)
    is_read_by_index = all(user.target is operator.getitem for user in node.users)
    return is_last and argument(node, 3, "largest", True) and scores.shape[-1] <= _MOST_COLS and is_read_by_index


def _softmaxed(scores: Any) -> Any:
    """The logits of which `scores` is a float32 softmax over the last dimension that nothing else reads."""
    out = value_of(scores)
    if scores.target not in ("softmax", torch.softmax, F.softmax) or len(scores.users) > 1 or out is None:
        return None
    is_last = argument(scores, 1, "dim") in (-1, out.dim() - 1)
    logits = value_of(argument(scores, 0, "input"))
    if not is_last or out.dtype != torch.float32 or logits is None or logits.dtype not in FLOATS:
        return None
    source = through_casts(argument(scores, 0, "input"))
    return source if value_of(source).shape == out.shape else argument(scores, 0, "input")


def _replace_with_softmax(graph: Graph, node: Node, source: tuple[Any, int], results: _Results) -> None:
    dtype = value_of(results.values).dtype
    with graph.inserting_before(node):
        arguments = (*source, results.is_normalized, dtype)
        chosen = graph.call_function(torch.ops.moespeq.softmax_topk.default, arguments)
        values, indices = (graph.call_function(operator.getitem, (chosen, index)) for index in (0, 1))
    replace(graph, results.values, values)
    for each in results.indices:
        replace(graph, each, indices)
    for each in (*reversed(results.dead), node, argument(node, 0, "input")):
        graph.erase_node(each)


def _results_of(node: Node) -> _Results | None:
    """Follows the values as far as the operator can; None when they are read at two places of the graph."""
    by_index = {index: [user for user in node.users if user.args[1] == index] for index in (0, 1)}
    if len(by_index[0]) != 1:
        return None
    values, dead = by_index[0][0], []
    divided = _normalized(values)
    if divided is not None:
        dead, values = [values, argument(divided, 1)], divided
    cast = only_user(values)
    if cast is not None and cast.target == "to" and value_of(cast) is not None and value_of(cast).dtype in FLOATS:
        dead, values = [*dead, values], cast
    return _Results(values, by_index[1], dead, is_normalized=divided is not None)


def _normalized(values: Node) -> Any:
    """The node values / values.sum(-1, keepdim=True), when nothing else reads the values."""
    total = next((user for user in values.users if user.target == "sum"), None)
    divided = only_user(total) if total is not None else None
    if divided is None or divided.target not in (operator.truediv, operator.itruediv):
        return None
    is_row_sum = argument(total, 1, "dim") == -1 and argument(total, 2, "keepdim", False)
    return divided if is_row_sum and divided.args == (values, total) and set(values.users) == {total, divided} else None
