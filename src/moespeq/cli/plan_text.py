"""A plan for people, a line a figure with its reason, and for programs, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from moespeq.config import format_at_least, format_bytes
from moespeq.forecast import PlanReport
from moespeq.plan import MemoryPlan
from moespeq.plan.sharing import Sharing
from moespeq.plan.speed import Speed

__all__ = ["json_of", "lines_of"]

_NAME_WIDTH, _SIZE_WIDTH = 18, 12


def lines_of(report: PlanReport) -> Iterator[str]:
    """Title, then the plan and what follows from it, or why there is none and what would fit."""
    yield f"{report.model}, by {report.source}"
    if report.plan is None:
        yield from _refusal(report)
        return
    plan = report.plan
    yield ""
    yield from _memory(plan)
    yield _line(
        "host memory", plan.host_bytes, plan.reasons.get("host_memory", "as asked for, at most what the records take")
    )
    yield _line("disk", report.disk_bytes, "the store: dense weights, base and records")
    yield ""
    yield "what auto became"
    shown = (*_DECIDED, *(name for name in plan.reasons if name not in (*_DECIDED, *_ELSEWHERE)))
    yield from (f"  {name:<{_NAME_WIDTH - 2}}{plan.reasons[name]}" for name in shown if name in plan.reasons)
    yield ""
    yield from _speed(report, report.speed)
    if report.sharing is not None:
        yield from _sharing(report.sharing)
    yield from _helps(report)


_DECIDED = ("device", "device_memory", "records", "ctx_size", "rows", "k", "k_max")
_ELSEWHERE = ("base", "num_slots", "host_memory")  # shown beside their sizes


def _line(name: str, num_bytes: int, reason: str) -> str:
    size = format_bytes(num_bytes)
    return f"{name:<{_NAME_WIDTH}}{size:>{_SIZE_WIDTH}}  {reason.removeprefix(size).lstrip(':, ')}"


def _memory(plan: MemoryPlan) -> Iterator[str]:
    yield _line("device memory", plan.total_bytes, f"of {format_bytes(plan.budget_bytes)} on {plan.reasons['device']}")
    yield _line("  dense weights", plan.dense_bytes, "embeddings, attention, norms, routers, shared experts")
    yield _line("  INT4 base", plan.base_bytes, plan.reasons.get("base", "on demand nothing is drafted"))
    yield _line("  KV cache", plan.kv_bytes, f"{plan.context_tok} tokens, draft and target share it")
    for figure in plan.workspace:
        yield _line(f"  {figure.name}", figure.num_bytes, figure.reason)
    slots = f"{plan.num_slots} of {format_bytes(plan.slot_bytes)}: {plan.reasons['num_slots']}"
    yield _line("  expert slots", plan.slots_bytes, slots)


def _speed(report: PlanReport, speed: Speed | None) -> Iterator[str]:
    if speed is None:
        assert report.plan is not None
        if report.options.records == "mixed":
            yield "speed: unknown, for nobody knows how often a draft agrees that has a part of its base"
        else:
            yield f"speed: unknown; `moespeq profile {report.model}` measures, or give --link-bandwidth"
        return
    bytes_per_s = 1.0 / speed.s_per_byte
    rate = f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    yield f"hits              {speed.hit_share:.0%} or more of the experts a pass asks for: as if all were used alike"
    committed = f"{speed.committed_per_round:.1f} tokens a round if drafts are accepted as on trained models"
    yield f"k                 {speed.k}: {committed if speed.k else 'plain decoding'}"
    if speed.is_link_alone:
        what = f"the link of {rate} alone allows; draft and verify are not measured (`moespeq profile MODEL`)"
        yield f"tokens/s          at most about {speed.tokens_per_s:.3g}: what {what}"
    else:
        yield f"tokens/s          about {speed.tokens_per_s:.3g} by the profile, over a link of {rate}"


def _sharing(sharing: Sharing) -> Iterator[str]:
    parts = f"{format_bytes(sharing.dense_bytes)} dense weights, {format_bytes(sharing.kv_bytes)} KV cache"
    yield (
        f"sharing saves     {format_bytes(sharing.saved_bytes)}, {sharing.saved_share:.0%} of what a draft of its own "
        f"and bf16 experts would take: {parts}, {format_bytes(sharing.slots_bytes)} in slots, "
        f"{format_bytes(sharing.host_bytes)} in host memory"
    )


def _helps(report: PlanReport) -> Iterator[str]:
    if report.speed is None:
        return
    yield ""
    yield "what would help most" if report.helps else "more memory, a faster link or fewer bits would not help"
    for one in report.helps:
        yield f"  {one.gain:5.2f}x  {one.change}: {one.tokens_per_s:.3g} tokens/s"


def _refusal(report: PlanReport) -> Iterator[str]:
    yield f"does not fit: {report.refusal}"
    if not report.ways:
        return
    yield ""
    yield "what takes less"
    width = max(len(way.options) for way in report.ways)
    for way in report.ways:
        verdict = "fits" if way.is_enough else "does not fit"
        yield f"  {way.options:<{width}}  at least {format_at_least(way.least_bytes):>10}  {verdict}"


def json_of(report: PlanReport) -> dict[str, Any]:
    """`fits`, then the plan's figures in bytes, or `refusal` and `ways`."""
    plan = report.plan
    found: dict[str, Any] = {"model": report.model, "source": report.source, "fits": plan is not None}
    if plan is None:
        return found | {"refusal": report.refusal, "ways": [asdict(way) for way in report.ways]}
    speed, sharing = report.speed, report.sharing
    return found | {
        "device": plan.device,
        "records": report.options.records,
        "budget_bytes": plan.budget_bytes,
        "total_bytes": plan.total_bytes,
        "dense_bytes": plan.dense_bytes,
        "base_bytes": plan.base_bytes,
        "kv_bytes": plan.kv_bytes,
        "workspace_bytes": {figure.name: figure.num_bytes for figure in plan.workspace},
        "slots_bytes": plan.slots_bytes,
        "slot_bytes": plan.slot_bytes,
        "num_slots": plan.num_slots,
        "num_bases": plan.num_bases,
        "host_bytes": plan.host_bytes,
        "disk_bytes": report.disk_bytes,
        "context_tok": plan.context_tok,
        "threads": plan.threads,
        "reasons": dict(plan.reasons),
        "speed": None if speed is None else asdict(speed),
        "sharing": None if sharing is None else asdict(sharing) | {"saved_share": round(sharing.saved_share, 4)},
        "helps": [asdict(one) for one in report.helps],
    }
