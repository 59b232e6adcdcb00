"""A plan for people, a line a figure with its reason, and for programs, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from shlex import quote
from typing import Any

from rich.table import Table

from moespeq.cli.console import column, out, print_table
from moespeq.config import format_at_least, format_bytes
from moespeq.forecast import PlanReport
from moespeq.forecast.fitting import WayToFit
from moespeq.plan import MemoryPlan
from moespeq.plan.sharing import Sharing
from moespeq.plan.speed import Speed

__all__ = ["json_of", "print_plan"]

_Row = tuple[str, str, str]
"""A figure's name, the figure, and what it follows from."""
_DECIDED = ("target", "device", "device_memory", "records", "ctx_size", "rows", "k", "k_max")
_ELSEWHERE = ("base", "num_slots", "host_memory")  # shown beside their sizes


def print_plan(report: PlanReport) -> None:
    """Title, then the plan and what follows from it, or why there is none and what would fit."""
    out.print(f"{report.model}, by {report.source}")
    out.print()
    if report.plan is None:
        _print_refusal(report)
        return
    plan = report.plan
    _print_rows([*_memory(plan), *_elsewhere(report, plan)])
    out.print()
    out.print("what auto became")
    shown = (*_DECIDED, *(name for name in plan.reasons if name not in (*_DECIDED, *_ELSEWHERE)))
    _print_rows([(f"  {name}", "", plan.reasons[name]) for name in shown if name in plan.reasons])
    out.print()
    _print_rows([*_speed(report), *_sharing(report.sharing)])
    _print_helps(report)


def _print_rows(rows: list[_Row]) -> None:
    """Names, figures and reasons below each other; the middle column is left out where there are no figures."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    has_figures = any(figure for _, figure, _ in rows)
    if has_figures:
        table.add_column(no_wrap=True, justify="right")
    table.add_column()
    for name, figure, reason in rows:
        table.add_row(*((name, figure, reason) if has_figures else (name, reason)))
    print_table(table)


def _line(name: str, num_bytes: int, reason: str) -> _Row:
    size = format_bytes(num_bytes)
    return name, size, reason.removeprefix(size).lstrip(":, ")


def _memory(plan: MemoryPlan) -> Iterator[_Row]:
    yield _line("device memory", plan.total_bytes, f"of {format_bytes(plan.budget_bytes)} on {plan.device}")
    yield _line("  dense weights", plan.dense_bytes, "embeddings, attention, norms, routers, shared experts")
    yield _line("  INT4 base", plan.base_bytes, plan.reasons.get("base", "on demand nothing is drafted"))
    shared = "draft and target share it" if plan.num_bases else "of the target"
    yield _line("  KV cache", plan.kv_bytes, f"{plan.context_tok} tokens, {shared}")
    yield _line("  workspace", plan.workspace_bytes, "together:")
    for figure in plan.workspace:
        yield _line(f"    {figure.name}", figure.num_bytes, figure.reason)
    slots = f"{plan.reasons['num_slots']}, {format_bytes(plan.slot_bytes)} each"
    yield _line("  expert slots", plan.slots_bytes, slots)


def _elsewhere(report: PlanReport, plan: MemoryPlan) -> Iterator[_Row]:
    reason = plan.reasons.get("host_memory", "as asked for, at most what the records take")
    yield _line("host memory", plan.host_bytes, reason)
    yield _line("disk", report.disk_bytes, "the store: dense weights, base and records")


def _speed(report: PlanReport) -> Iterator[_Row]:
    speed = report.speed
    alike = "or more of the experts a pass asks for: reckoned as if all were used alike"
    yield "hits", f"{report.hit_share:.0%}", alike if report.hit_share < 1.0 else "every expert is resident"
    if speed is None:
        yield "tokens/s", "unknown", _why_unknown(report)
        return
    committed = f"a round commits {speed.committed_per_round:.1f} tokens if drafts are accepted as on trained models"
    chosen = "; the fastest by these figures, auto goes by the rounds it measures" if _is_auto(report) else ""
    yield "k", str(speed.k), f"{committed if speed.k else 'plain decoding'}{chosen}"
    bytes_per_s = 1.0 / speed.s_per_byte
    rate = f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
    (tokens_per_s,) = column([speed.tokens_per_s])
    if speed.is_link_alone:
        what = f"the link of {rate} alone allows; draft and verify are not measured ({_profile_command(report)})"
        yield "tokens/s", tokens_per_s, f"at most, what {what}"
    else:
        slower = "slower where the machine is busier than it was then"
        rests_on = f"by the profile, over a link of {rate}; {slower}"
        yield "tokens/s", tokens_per_s, f"{_if_accepted(report, speed)}{rests_on}"


def _is_auto(report: PlanReport) -> bool:
    """Whether a governor chooses k."""
    return report.options.k == "auto" and report.plan is not None and report.plan.num_bases > 0


def _if_accepted(report: PlanReport, speed: Speed) -> str:
    """What a speed that counts on drafts becomes without them."""
    if not speed.k:
        return ""
    goes_back = _is_auto(report) and not report.options.k_min
    plain = "plain decoding, which auto goes back to where few are kept" if goes_back else "plain decoding"
    return f"if rounds commit that many, {column([speed.plain_tokens_per_s])[0]} by {plain}; "


def _profile_command(report: PlanReport) -> str:
    where = "" if report.is_here else " on the machine with that GPU"
    return f"`moespeq profile {quote(report.asked)}`{where}"


def _why_unknown(report: PlanReport) -> str:
    if report.options.records == "mixed":
        return "nobody knows how often a draft agrees that has a part of its base"
    if report.hit_share == 1.0:
        return f"no expert crosses the link, so only computing bounds it, which {_profile_command(report)} measures"
    return f"{_profile_command(report)} measures, or give --link-bandwidth (25GB: PCIe 4 x16)"


def _sharing(sharing: Sharing | None) -> Iterator[_Row]:
    if sharing is None:
        yield "sharing saves", "0 B", "nothing is drafted, so there is no draft to share with"
        return
    parts = f"{format_bytes(sharing.dense_bytes)} dense weights, {format_bytes(sharing.kv_bytes)} KV cache"
    reason = (
        f"{sharing.saved_share:.0%} of what a draft of its own and bf16 experts would take: {parts}, "
        f"{format_bytes(sharing.slots_bytes)} in slots, {format_bytes(sharing.host_bytes)} in host memory"
    )
    yield "sharing saves", format_bytes(sharing.saved_bytes), reason


def _print_helps(report: PlanReport) -> None:
    if report.speed is None:
        return
    out.print()
    none = "by these figures more memory, a faster link or fewer bits would not help"
    out.print("what would help most" if report.helps else none)
    speeds = column([one.tokens_per_s for one in report.helps])
    rows = zip(report.helps, speeds, strict=True)
    _print_rows([(f"  {one.gain:.2f}x", f"{tokens_per_s} tokens/s", one.change) for one, tokens_per_s in rows])


def _print_refusal(report: PlanReport) -> None:
    out.print(f"does not fit: {report.refusal}")
    if not report.ways:
        return
    out.print()
    is_enough = report.ways[0].is_enough
    out.print("what fits" if is_enough else "no other option fits; each takes at least")
    _print_rows([(f"  {way.options}", format_at_least(way.least_bytes), _verdict(way)) for way in report.ways])
    if report.draft_needs:
        sizes = [f"{format_at_least(one.least_bytes)} with --ctx-size {one.context_tok}" for one in report.draft_needs]
        out.print(f"a whole draft takes device memory of at least {', or '.join(sizes)}")


def _verdict(way: WayToFit) -> str:
    if not way.is_enough:
        return "of device memory, more than there is or was given"
    return f"of device memory at least, {'with' if way.has_draft else 'without'} a draft"


def json_of(report: PlanReport) -> dict[str, Any]:
    """`fits`, then the plan's figures in bytes, or `refusal` and `ways`."""
    plan = report.plan
    found: dict[str, Any] = {"model": report.model, "source": report.source, "fits": plan is not None}
    if plan is None:
        ways, needs = [asdict(way) for way in report.ways], [asdict(need) for need in report.draft_needs]
        return found | {"refusal": report.refusal, "ways": ways, "draft_needs": needs}
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
        "hit_share": round(report.hit_share, 4),
        "speed": None if speed is None else asdict(speed),
        "speed_unknown": _why_unknown(report) if speed is None else None,
        "sharing": None if sharing is None else asdict(sharing) | {"saved_share": round(sharing.saved_share, 4)},
        "helps": [asdict(one) for one in report.helps],
    }
