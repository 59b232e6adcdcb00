"""Reading the nodes of a graph that torch.compile hands to a backend: shapes, arguments, views, casts, writes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = [
    "FLOATS",
    "argument",
    "is_contiguous_input",
    "is_one_row",
    "only_user",
    "replace",
    "through_aliases",
    "through_casts",
    "through_views",
    "value_of",
    "written_nodes",
]

FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""What the operators compute with: float32 holds all of them exactly."""


_VIEWS = frozenset({"view", "reshape", "contiguous", "flatten", "squeeze", "unsqueeze", "view_as"})
_CASTS = frozenset({"to", "type", "float"})
_OTHER_ALIASES = frozenset(
    {"type_as", "transpose", "permute", "t", "expand", "expand_as", "narrow", "select", "detach"}
)
_ALIASING_FUNCTIONS = frozenset({operator.getitem, torch.split, torch.chunk, torch.transpose, torch.reshape})
_WRITING_FUNCTIONS = frozenset({operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem})


def value_of(node: Any) -> Any:
    """The fake tensor that the node yields, None when it yields something else or is no node."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def argument(node: Any, place: int, name: str = "", default: Any = None) -> Any:
    """An argument given by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def is_one_row(node: Any) -> bool:
    """Whether all elements lie in the last dimension."""
    value = value_of(node)
    return value is not None and value.dtype in FLOATS and value.dim() > 0 and value.numel() == value.shape[-1]


def is_contiguous_input(node: Any) -> bool:
    """Whether the node is a contiguous input of the graph, as weights are: there from its begin, never written."""
    value = value_of(node)
    return value is not None and node.op == "placeholder" and value.is_contiguous()


def only_user(node: Any) -> Any:
    """The node that alone reads this one, None when there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def replace(graph: Graph, node: Node, replacement: Node) -> None:
    """Let `replacement`, which yields the same shape and type, take the node's place."""
    replacement.meta.update(node.meta)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)


def through_views(node: Any) -> Any:
    """The earliest node with the same elements in the same order."""
    while node.op == "call_method" and node.target in _VIEWS and _source(node) is not None:
        node = node.args[0]
    return node


def through_casts(node: Any) -> Any:
    """The earliest node with the same elements, whose numbers float32 holds exactly as this node's numbers."""
    node = through_views(node)
    while node.op == "call_method" and node.target in _CASTS and _is_widening(node):
        node = through_views(node.args[0])
    return node


def written_nodes(graph: Graph) -> set[Node]:
    """Where in-place operations write: the nodes whose memory it is."""
    written: set[Node] = set()
    for node in graph.nodes:
        is_method = node.op == "call_method" and str(node.target).endswith("_")
        if (is_method or node.target in _WRITING_FUNCTIONS) and isinstance(node.args[0], Node):
            written.add(through_aliases(node.args[0]))
        if isinstance(node.kwargs.get("out"), Node):
            written.add(through_aliases(node.kwargs["out"]))
    return written


def through_aliases(node: Any) -> Any:
    """The node whose memory this one may share."""
    while node.args and isinstance(node.args[0], Node) and _may_alias(node):
        node = node.args[0]
    return node


def _may_alias(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _VIEWS | _CASTS | _OTHER_ALIASES or str(node.target).endswith("_")
    return node.target in _ALIASING_FUNCTIONS or node.target in _WRITING_FUNCTIONS


def _source(node: Node) -> Any:
    source, here = value_of(node.args[0]), value_of(node)
    if source is None or here is None or source.numel() != here.numel():
        return None
    return node.args[0]


def _is_widening(node: Node) -> bool:
    source, here = value_of(node.args[0]), value_of(node)
    if source is None or here is None or source.device != here.device:
        return False
    return here.dtype in (source.dtype, torch.float32) and source.dtype in FLOATS
