"""How much host memory the records of a GPU take: all of them if they fit, else a cache of the often read."""

from __future__ import annotations

from moespeq.config import LoadOptions, format_bytes
from moespeq.errors import BudgetError
from moespeq.plan.machine import Machine

__all__ = ["plan_host_arena", "plan_host_cache"]

_HOST_SHARE = 0.85  # of the free host memory; the rest is the operating system's and this process's own
_LEAST_RECORDS = 8  # fewer would leave the disk or the link idle


def plan_host_cache(options: LoadOptions, machine: Machine, reasons: dict[str, str]) -> int:
    """Bytes of the cache before the disk where the device is host memory. Raises BudgetError."""
    if options.host_memory is None:
        reasons["host_memory"] = "0 B: the device is host memory, a second copy there would gain nothing"
        return 0
    if options.host_memory >= machine.host_free_bytes:
        raise BudgetError(_too_large("cache", options.host_memory, machine))
    return options.host_memory


def plan_host_arena(
    records_bytes: int, slot_bytes: int, options: LoadOptions, machine: Machine, reasons: dict[str, str]
) -> int:
    """Bytes of pinned memory in front of the link; `records_bytes` holds every record. Raises BudgetError."""
    least_bytes = min(_LEAST_RECORDS * slot_bytes, records_bytes)
    if options.host_memory is not None:
        host_bytes = min(max(options.host_memory, least_bytes), records_bytes)
        if host_bytes >= machine.host_free_bytes:
            raise BudgetError(_too_large("arena", host_bytes, machine))
        if host_bytes > options.host_memory:
            reasons["host_memory"] = f"{format_bytes(host_bytes)}: {_LEAST_RECORDS} records, the least that is useful"
        return host_bytes
    share_bytes = int(_HOST_SHARE * machine.host_free_bytes)
    if share_bytes < least_bytes:
        raise BudgetError(
            f"{_HOST_SHARE:.0%} of the {format_bytes(machine.host_free_bytes)} of host memory that are free hold less "
            f"than {_LEAST_RECORDS} expert records, {format_bytes(least_bytes)}; free some memory."
        )
    if records_bytes <= share_bytes:
        reasons["host_memory"] = f"{format_bytes(records_bytes)}: every record fits, pinned"
        return records_bytes
    reasons["host_memory"] = (
        f"{format_bytes(share_bytes)}: {_HOST_SHARE:.0%} of the {format_bytes(machine.host_free_bytes)} free, a cache "
        f"of records that take {format_bytes(records_bytes)}; the others come from the disk"
    )
    return share_bytes


def _too_large(name: str, host_bytes: int, machine: Machine) -> str:
    return (
        f"The host {name} of {format_bytes(host_bytes)} is larger than the {format_bytes(machine.host_free_bytes)} of "
        f"host memory that are free; lower --host-memory."
    )
