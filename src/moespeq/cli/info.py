"""`moespeq info`: what a store or checkpoint is and what it takes, without loading it."""

from __future__ import annotations

from typing import Annotated

import typer

from moespeq.cli import options

__all__ = ["command"]

_LeastMemory = dict[str, dict[str, dict[str, int]]]
_DEVICES = {"cpu": "CPU", "cuda": "GPU"}
_WAY_WIDTH, _SIZE_WIDTH = 38, 14
_LABELS = {
    "context_tok": "context in tokens",
    "dense_bytes": "dense weights",
    "base_bytes": "base",
    "records_bytes": "all records",
    "slot_bytes": "one slot",
    "kv_bytes_per_tok": "KV cache per token",
    "size_bytes": "size",
    "routed_experts_bytes": "of that routed experts",
    "passes_on_cuda": "passes on CUDA",
}
_WAYS = {
    "with_draft": "with the whole draft",
    "base_travels": "without (the base travels, k = 0)",
    "on_demand": "on demand",
}


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A store or a checkpoint folder.")] = None,
    *,
    families: Annotated[
        bool, typer.Option("--families", help="List the model families, and why others are not taken.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Describe a store or checkpoint without loading it.

    Of a store, with the least memory of each way to run it. With --families, what can be run at all.

    Example: moespeq info olmoe.moespeq
    """
    from moespeq.cli.console import out, print_json, start_torch
    from moespeq.cli.refusals import refuse_at_once
    from moespeq.config import format_at_least, format_bytes
    from moespeq.errors import UsageError

    if (model is None) != families:
        raise UsageError("Give a MODEL to describe, or --families alone.")
    refuse_at_once(model, {})
    start_torch()
    from moespeq.inspection import describe_model

    if model is None:
        _print_families(has_json=json)
        return
    facts = describe_model(model)
    if json:
        print_json(facts)
        return
    least_memory: _LeastMemory = facts.pop("least_memory_bytes", {})
    width = max(map(len, map(_label, facts)))
    for name, value in facts.items():
        out.print(f"{_label(name):<{width}}  {format_bytes(value) if '_bytes' in name else value}")
    for device, contexts in least_memory.items():
        out.print()
        heads = "".join(f"{f'{tok} tokens':>{_SIZE_WIDTH}}" for tok in contexts)
        out.print(f"{f'least memory on a {_DEVICES[device]}':<{_WAY_WIDTH}}{heads}")
        for way, words in _WAYS.items():
            sizes = "".join(f"{format_at_least(ways[way]):>{_SIZE_WIDTH}}" for ways in contexts.values())
            out.print(f"  {words:<{_WAY_WIDTH - 2}}{sizes}")


def _label(name: str) -> str:
    """A fact's name in words; a size's unit stands with the figure."""
    return _LABELS.get(name) or name.replace("_", " ")


def _print_families(*, has_json: bool) -> None:
    from rich.table import Table

    from moespeq.cli.console import print_json, print_table
    from moespeq.model.families import describe_families, tell_families

    if has_json:
        print_json({"families": describe_families()})
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()  # wraps within itself, beside the names
    for name, told in tell_families():
        table.add_row(name, told)
    print_table(table)
