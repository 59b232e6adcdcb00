"""What would make a planned engine faster: other plans, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from moespeq.config import LoadOptions
from moespeq.decode.planning import ModelSizes, plan_for
from moespeq.errors import BudgetError, UsageError
from moespeq.forecast.sizes import FEWER_BITS, FewerBits
from moespeq.plan import Machine, MemoryPlan
from moespeq.plan.speed import Speed, expected_speed

__all__ = ["AGREEMENT", "Help", "what_helps"]

AGREEMENT = {4: 0.966, 3: 0.944, 2: 0.875}
"""Share of next tokens on which draft and target agree, by the bits of the base (docs/adr/0002)."""

_MORE_MEMORY, _FASTER_LINK = 1.25, 2.0
_LEAST_GAIN = 1.01  # less is no help


@dataclass(frozen=True, slots=True)
class Help:
    """One change, and how many times as fast decoding then is."""

    change: str
    tokens_per_s: float
    gain: float


def what_helps(sizes: ModelSizes, options: LoadOptions, machine: Machine, plan: MemoryPlan, now: Speed) -> list[Help]:
    """Each change alone, the one that helps most first; what gains less than a hundredth is left out."""
    found = []
    for change, other_sizes, other_options, other_machine in _changes(sizes, options, machine, plan):
        with suppress(BudgetError, UsageError):
            chosen, other_plan = plan_for(other_sizes, other_options, other_machine)
            needs = other_sizes.needs(chosen.records)
            agreement = AGREEMENT[other_sizes.base_bits]
            then = expected_speed(other_plan, needs, chosen, other_machine, agreement=agreement)
            if then is None or then.is_link_alone != now.is_link_alone:
                continue
            gain = then.tokens_per_s / now.tokens_per_s
            if gain >= _LEAST_GAIN:
                found.append(Help(change, then.tokens_per_s, gain))
    return sorted(found, key=lambda one: -one.gain)


def _changes(
    sizes: ModelSizes, options: LoadOptions, machine: Machine, plan: MemoryPlan
) -> Iterator[tuple[str, ModelSizes, LoadOptions, Machine]]:
    more_bytes = int(_MORE_MEMORY * plan.budget_bytes)
    roomy = replace(
        machine,
        host_free_bytes=machine.host_free_bytes + more_bytes,
        gpu_free_bytes=None if machine.gpu_free_bytes is None else machine.gpu_free_bytes + more_bytes,
    )
    more = f"{_MORE_MEMORY - 1:.0%} more device memory"
    yield more, sizes, replace(options, device_memory=more_bytes), roomy
    yield f"a link {_FASTER_LINK:g} times as fast", sizes, *_with_faster_link(options, machine)
    if sizes.base_bits > FEWER_BITS and not sizes.is_plain:
        yield f"a base of {FEWER_BITS} bits (prepare --bits {FEWER_BITS})", FewerBits(sizes), options, machine
    if plan.device == "cuda":
        ample = replace(machine, host_free_bytes=1 << 60)
        yield "host memory for every record", sizes, replace(options, host_memory=None), ample


def _with_faster_link(options: LoadOptions, machine: Machine) -> tuple[LoadOptions, Machine]:
    pace, profile = options.link_bytes_per_s, machine.profile
    if pace is not None:
        options = replace(options, link_bytes_per_s=_FASTER_LINK * pace)
    if profile is not None:
        faster = replace(
            profile,
            pinned_copy={size: _FASTER_LINK * rate for size, rate in profile.pinned_copy.items()},
            pageable_copy={size: _FASTER_LINK * rate for size, rate in profile.pageable_copy.items()},
            disk=tuple(replace(rate, bytes_per_s=_FASTER_LINK * rate.bytes_per_s) for rate in profile.disk),
        )
        machine = replace(machine, profile=faster)
    return options, machine
