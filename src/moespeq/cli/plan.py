"""`moespeq plan`: where every byte of a model would go, how fast it would be, and what would help."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moespeq.cli import options
from moespeq.cli.options import parse_k

__all__ = ["command"]

EXIT_NO_FIT = 2


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A store, a checkpoint or its config and index alone, or a hub id."),
    ],
    *,
    device: options.Device = "auto",
    device_memory: options.DeviceMemory = None,
    base_memory: options.BaseMemory = None,
    host_memory: options.HostMemory = None,
    ctx_size: options.CtxSize = None,
    prefill_rows: options.PrefillRows = None,
    k: options.K = "auto",
    k_min: options.KMin = 0,
    itl_budget: options.ItlBudget = None,
    rows: options.Rows = None,
    threads: options.Threads = None,
    link_bandwidth: options.LinkBandwidth = None,
    convert_to: options.ConvertTo = None,
    mode: options.Mode = "speculative",
    json: options.Json = False,
) -> None:
    """Plan a model without reading its weights; exit code 2 where it does not fit, with what would.

    Example: moespeq plan org/name --device cuda --device-memory 24GiB
    """
    from moespeq.cli.console import print_json, start_torch
    from moespeq.cli.refusals import refuse_at_once

    asked: dict[str, Any] = {
        "device": device,
        "device_memory": device_memory,
        "base_memory": base_memory,
        "host_memory": host_memory,
        "ctx_size": ctx_size,
        "prefill_rows": prefill_rows,
        "k": parse_k(k),
        "k_min": k_min,
        "itl_budget_ms": itl_budget,
        "rows": rows,
        "threads": threads,
        "link_bytes_per_s": link_bandwidth,
        "convert_to": convert_to,
        "mode": mode,
    }
    refuse_at_once(model, asked)
    start_torch()
    from moespeq.cli.plan_text import json_of, print_plan
    from moespeq.forecast import plan_model

    report = plan_model(model, **asked)
    if json:
        print_json(json_of(report))
    else:
        print_plan(report)
    if report.plan is None:
        raise typer.Exit(EXIT_NO_FIT)
