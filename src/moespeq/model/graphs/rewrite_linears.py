"""Linear maps: those of the same row as one operator, those of one output column as a product and a sum.

An operator stands where the first of its linear maps stood. The weights are inputs of the graph and its row is written
nowhere, so what the later ones read is known there.

Shapes: N output columns of one weight.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from moespeq.model.graphs.fx_nodes import (
    FLOATS,
    argument,
    is_contiguous_input,
    is_one_row,
    only_user,
    replace,
    through_aliases,
    through_casts,
    value_of,
    written_nodes,
)

__all__ = ["merge_linears", "spell_out_single_outputs"]


@dataclass(frozen=True, slots=True)
class _Map:
    """One result of an operator: `node`, a linear map or the product of a gated pair of them, [.., N].

    `dead` are the nodes of such a pair, those first that read the others.
    """

    node: Node
    gate: Node | None
    weight: Node
    bias: Node | None
    dead: tuple[Node, ...] = ()

    @property
    def num_outputs(self) -> int:
        return int(value_of(self.node).shape[-1])


def merge_linears(graph: Graph) -> int:
    """Put all linear maps of the same row and result type into one operator; returns how many linear maps."""
    written = written_nodes(graph)
    groups: dict[tuple[Node, torch.dtype], list[Node]] = {}
    for node in _linears(graph):
        row = _row_of(node)
        if row is not None and through_aliases(row) not in written:
            groups.setdefault((row, value_of(node).dtype), []).append(node)
    for nodes in groups.values():
        _merge(graph, nodes)
    return sum(map(len, groups.values()))


def spell_out_single_outputs(graph: Graph) -> int:
    """Write x @ w.T of one output column as a sum over each row; returns how many."""
    single = [node for node in _linears(graph) if value_of(node).shape[-1] == 1 and value_of(node).dtype in FLOATS]
    for node in single:
        x, weight, bias = (argument(node, place, name) for place, name in enumerate(("input", "weight", "bias")))
        with graph.inserting_before(node):
            wide_x, wide_weight = (graph.call_method("float", (factor,)) for factor in (x, weight))
            products = graph.call_function(operator.mul, (wide_x, wide_weight))
            total = graph.call_method("sum", (products, -1), {"keepdim": True})
            if bias is not None:
                total = graph.call_function(operator.add, (total, bias))
            replace(graph, node, graph.call_method("to", (total, value_of(node).dtype)))
    return len(single)


def _linears(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target is torch._C._nn.linear and value_of(node) is not None]


def _row_of(node: Node) -> Any:
    """The one row that a linear map reads, as it was before views and casts; None when the operator cannot do it."""
    x, weight, bias = (argument(node, place, name) for place, name in enumerate(("input", "weight", "bias")))
    if not (is_one_row(x) and isinstance(weight, Node) and is_contiguous_input(through_casts(weight))):
        return None
    if value_of(weight).dtype not in FLOATS or not (bias is None or is_contiguous_input(bias)):
        return None
    return through_casts(x)


def _merge(graph: Graph, nodes: list[Node]) -> None:
    row, dtype = _row_of(nodes[0]), value_of(nodes[0]).dtype
    maps = _maps_of(nodes)
    with graph.inserting_before(nodes[0]):
        flat = graph.call_method("reshape", (row, (-1,)))
        columns = zip(*((m.gate, m.weight, m.bias) for m in maps), strict=True)
        merged = graph.call_function(torch.ops.moespeq.linears.default, (flat, *map(list, columns), dtype))
    first = 0
    for result in maps:
        last = first + result.num_outputs
        with graph.inserting_before(result.node):
            part = graph.call_function(operator.getitem, (merged, slice(first, last)))
            shaped = graph.call_method("reshape", (part, tuple(value_of(result.node).shape)))
        replace(graph, result.node, shaped)
        for node in result.dead:
            graph.erase_node(node)
        first = last


def _maps_of(nodes: list[Node]) -> list[_Map]:
    """The linear maps in order, a gated pair as one at the place of its gate."""
    pairs: dict[Node, tuple[Node, Node]] = {}
    for node in nodes:
        pair = _gated_pair(node, nodes)
        if pair is not None:
            pairs[node] = pair
    ups = {up for up, _ in pairs.values()}
    maps = []
    for node in nodes:
        weight = through_casts(argument(node, 1))
        if node in pairs:
            up, product = pairs[node]
            dead = (only_user(node), node, up)
            maps.append(_Map(product, weight, through_casts(argument(up, 1)), None, dead))
        elif node not in ups:
            maps.append(_Map(node, None, weight, argument(node, 2, "bias")))
    return maps


def _gated_pair(gate: Node, nodes: list[Node]) -> tuple[Any, Node] | None:
    """The up projection and the product, when `gate` is read only by silu(gate) * up and up by nothing else."""
    activated = only_user(gate)
    if activated is None or activated.target is not F.silu:
        return None
    product = only_user(activated)
    if product is None or product.target is not operator.mul:
        return None
    up = next((factor for factor in product.args if factor is not activated), None)
    if up not in nodes or only_user(up) is not product or value_of(up).shape != value_of(gate).shape:
        return None
    has_bias = any(argument(node, 2, "bias") is not None for node in (gate, up))
    return None if has_bias else (up, product)
