"""A layer's graph, rewritten before it is compiled: patterns that compilers leave as many launches become one each.

Works on the graph that torch.compile hands to a backend, where torch's functions still bear their names and every node
knows its shape. What is not recognised stays as it is.

- One row: norms with the addition before them; all linear maps that read the same row, with the activation and the
  product of a gated MLP.
- Any rows: top-k with the softmax before it.
- Several rows, one output column: a product and a sum, which the compiler fuses with what is around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from moespeq.model.graphs.rewrite_linears import merge_linears, spell_out_single_outputs
from moespeq.model.graphs.rewrite_norms import replace_norms
from moespeq.model.graphs.rewrite_topk import replace_topk

__all__ = ["Rewritten", "rewrite"]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """How many of each were replaced."""

    norms: int
    linears: int
    single_outputs: int
    topk: int


def rewrite(graph: Graph) -> Rewritten:
    """Rewrite in place; the operators must have been registered."""
    norms = replace_norms(graph)
    linears = merge_linears(graph)
    counts = Rewritten(norms, linears, spell_out_single_outputs(graph), replace_topk(graph))
    graph.lint()
    return counts
