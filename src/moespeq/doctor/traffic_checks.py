"""From what a server or a recorded run says of its link, memory and queue to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from moespeq.config import format_bytes
from moespeq.doctor.findings import Finding, fine, problem, skipped, warning
from moespeq.doctor.signals import Signals

__all__ = ["check_traffic"]

_MOST_STALL_SHARE = 0.15  # of the time in passes
_LEAST_BUSY_SHARE = 0.6  # of it, while passes wait that much
_MOST_MISS_SHARE = 0.2  # of the experts that layers asked for
_LEAST_COPY_BYTES = 256 << 10  # below, a copy's start takes as long as its bytes on a PCIe 4 link
_LEAST_RATE_SHARE = 0.6  # of what the profile measured
_LEAST_READ_BYTES = 4 << 20  # below, a disk's reads take longer to begin than to move: the profile reads long ones
_MOST_WASTED_SHARE = 0.2
_MOST_WAITING, _MOST_WAIT_S = 8, 60.0


def check_traffic(signals: Signals, profile_bytes_per_s: float | None) -> Iterator[Finding]:
    """profile_bytes_per_s: the link by `moespeq profile`, where this machine has one."""
    yield _waiting(signals)
    yield _window(signals)
    yield _copies(signals)
    yield _rate(signals, profile_bytes_per_s)
    yield _wasted(signals)
    yield _memory(signals)
    if signals.queue is not None:
        yield _queue(signals)


def _waiting(signals: Signals) -> Finding:
    """Whether passes wait for the link, and whether it was busy then."""
    name = "link use"
    if signals.pass_s <= 0:
        return skipped(name, f"{signals.source}: nothing was decoded")
    stalled = signals.stall_s / signals.pass_s
    told = f"passes waited for experts {stalled:.0%} of their time"
    if signals.link_busy_s is None:
        busy = None
    else:
        busy = signals.link_busy_s / signals.pass_s
        told = f"{told}, the link moved bytes {busy:.0%} of it"
    if stalled <= _MOST_STALL_SHARE:
        return fine(name, told)
    if busy is not None and busy < _LEAST_BUSY_SHARE:
        cause = "the link stands idle while passes wait: too little is foretold, or too late"
        return warning(
            name, told, cause, "look at the next checks; `moespeq profile` measures how deep the link's queue must be"
        )
    cause = "the link carries all it can: too few experts are resident"
    return warning(
        name, told, cause, f"moespeq plan {quote(signals.model)}: more --device-memory, or a base of fewer bits"
    )


def _window(signals: Signals) -> Finding:
    name = "lookahead window"
    if not signals.asked:
        return skipped(name, f"{signals.source}: no expert was asked for")
    share = signals.misses / signals.asked
    window = "all steps" if signals.lookahead_tok is None else f"{signals.lookahead_tok} steps"
    told = f"{signals.hits} hits, {signals.late} late, {signals.misses} misses ({share:.0%}); fetched for: {window}"
    has_drafted = signals.acceptance.drafts > signals.rounds / 2
    if not has_drafted:
        told = f"{told}; {signals.acceptance.drafts} of {signals.rounds} rounds drafted, the others foretell nothing"
    if share <= _MOST_MISS_SHARE or not has_drafted:
        return fine(name, told)
    if signals.lookahead_tok is not None:
        return warning(name, told, "draft steps past the window are not fetched for", "leave --lookahead out")
    cause = "the draft foretells other experts than the target asks for, or nothing is fetched ahead"
    return warning(
        name, told, cause, f"moespeq doctor {quote(signals.model)} checks the base; leave prefetch=False out"
    )


def _copies(signals: Signals) -> Finding:
    name = "copy sizes"
    if signals.record_bytes is None:
        return skipped(
            name, f"{signals.source} does not tell how large a copy is; a trace of `moespeq trace record` does"
        )
    told = f"{format_bytes(signals.record_bytes)} a copy"
    if signals.device == "cpu":
        return fine(name, f"{told}, from the disk")
    if signals.record_bytes >= _LEAST_COPY_BYTES:
        return fine(name, told)
    cause = "experts so small that starting a copy takes as long as its bytes"
    return warning(
        name, told, cause, f"moespeq plan {quote(signals.model)}: all experts may fit; else run with --device cpu"
    )


def _rate(signals: Signals, profile_bytes_per_s: float | None) -> Finding:
    name = "link rate"
    if not signals.link_busy_s or not signals.link_bytes:
        return skipped(name, f"{signals.source}: the link moved nothing")
    rate = signals.link_bytes / signals.link_busy_s
    told = f"{rate / 1e9:.3g} GB/s while it moved bytes"
    if profile_bytes_per_s is None:
        return skipped(name, f"{told}; `moespeq profile` measures what it could be")
    is_disk = signals.device == "cpu"
    if is_disk and (signals.record_bytes is None or signals.record_bytes < _LEAST_READ_BYTES):
        size = "unknown size" if signals.record_bytes is None else format_bytes(signals.record_bytes)
        return skipped(name, f"{told} from the disk, in reads of {size}; the profile measures reads of many MiB")
    told = f"{told}, {profile_bytes_per_s / 1e9:.3g} by the profile"
    if rate >= _LEAST_RATE_SHARE * profile_bytes_per_s:
        return fine(name, told)
    if is_disk:
        cause = "a --link-bandwidth, or somebody else reads from the disk"
        return warning(name, told, cause, "leave --link-bandwidth out; `moespeq profile` measures the disk anew")
    cause = "a --link-bandwidth, records from the disk, copies that are not pinned, or somebody else on the link"
    return warning(name, told, cause, "give more --host-memory; `moespeq doctor` there checks pinning and PCIe link")


def _wasted(signals: Signals) -> Finding:
    name = "wasted bytes"
    if not signals.link_bytes:
        return fine(name, "nothing crossed the link")
    share = signals.wasted_bytes / signals.link_bytes
    wasted, moved = format_bytes(signals.wasted_bytes), format_bytes(signals.link_bytes)
    told = f"{wasted} of {moved} were evicted before their use ({share:.0%})"
    if share <= _MOST_WASTED_SHARE:
        return fine(name, told)
    cause = "more is fetched ahead than slots can keep until it is used"
    return warning(name, told, cause, "run with --lookahead 4, or more --device-memory")


def _memory(signals: Signals) -> Finding:
    name = "out of memory"
    count = signals.failures.get("out_of_memory", 0)
    if not count:
        told = ", ".join(f"{number} {reason}" for reason, number in signals.failures.items() if number)
        return fine(name, f"no request failed for memory{f'; others: {told}' if told else ''}")
    model = quote(signals.model)
    cause = "the device's memory was promised away: other processes, or a budget of all that was free when it loaded"
    fewer_rows = "" if signals.device == "cpu" else "--rows 17 (k at most 16), "  # a CPU has no more unless asked
    remedy = (
        f"moespeq plan {model} --device-memory SIZE, then serve with that SIZE; smaller: {fewer_rows}"
        f"--ctx-size, --base-memory SIZE (a base for a part of the experts), moespeq prepare MODEL --bits 3"
    )
    return problem(name, f"{count} requests failed because memory ran out", cause, remedy)


def _queue(signals: Signals) -> Finding:
    name, queue = "queue", signals.queue
    assert queue is not None
    told = f"{queue.waiting} waiting, {queue.running} running"
    wait_s = None if queue.request_s is None else queue.waiting * queue.request_s
    told = told if queue.request_s is None else f"{told}; a request takes {queue.request_s:.1f} s"
    if queue.waiting <= _MOST_WAITING and (wait_s is None or wait_s <= _MOST_WAIT_S):
        return fine(name, told)
    cause = "requests come faster than one engine answers them, one at a time"
    return warning(
        name, told, cause, "moespeq serve MODEL --max-waiting 8 refuses early (429); or a second server beside it"
    )
