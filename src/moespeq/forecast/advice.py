"""What would make a planned engine faster, and what would make one fit that does not: other plans, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from moespeq.config import LoadOptions
from moespeq.decode.planning import ModelSizes, plan_for, record_choices
from moespeq.errors import BudgetError, UsageError
from moespeq.forecast.sizes import FEWER_BITS, FewerBits
from moespeq.plan import Machine, MemoryPlan, least_memory_bytes, resolve_options
from moespeq.plan.speed import Speed, expected_speed

__all__ = ["AGREEMENT", "Help", "WayToFit", "ways_to_fit", "what_helps"]

AGREEMENT = {4: 0.966, 3: 0.944, 2: 0.875}
"""Share of next tokens on which draft and target agree, by the bits of the base (docs/adr/0002)."""

_MORE_MEMORY, _FASTER_LINK = 1.25, 2.0
_SHORTER_CONTEXTS_TOK = (2048, 1024, 512, 256)


@dataclass(frozen=True, slots=True)
class Help:
    """One change, and how many times as fast decoding then is."""

    change: str
    tokens_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class WayToFit:
    """Options that take less: the least device memory with them, and whether an engine fits here."""

    options: str
    least_bytes: int
    is_enough: bool


def what_helps(sizes: ModelSizes, options: LoadOptions, machine: Machine, plan: MemoryPlan, now: Speed) -> list[Help]:
    """Each change alone, the one that helps most first; what cannot help is left out."""
    found = []
    for change, other_sizes, other_options, other_machine in _changes(sizes, options, machine, plan):
        with suppress(BudgetError, UsageError):
            chosen, other_plan = plan_for(other_sizes, other_options, other_machine)
            needs = other_sizes.needs(chosen.records)
            agreement = AGREEMENT[other_sizes.base_bits]
            then = expected_speed(other_plan, needs, chosen, other_machine, agreement=agreement)
            if then is not None and then.is_link_alone == now.is_link_alone and then.tokens_per_s > now.tokens_per_s:
                found.append(Help(change, then.tokens_per_s, then.tokens_per_s / now.tokens_per_s))
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


def ways_to_fit(sizes: ModelSizes, options: LoadOptions, machine: Machine) -> list[WayToFit]:
    """Options that take less than those that did not fit, the mildest first."""
    here = resolve_options(options, machine)
    ways: list[WayToFit] = []
    for words, changed in _smaller(sizes, here):
        with suppress(UsageError):
            less = _least_bytes(sizes, changed)
            if less < min([_least_bytes(sizes, here), *(way.least_bytes for way in ways if way.options in words)]):
                ways.append(WayToFit(words, less, _fits(sizes, changed, machine)))
    return ways


def _smaller(sizes: ModelSizes, options: LoadOptions) -> Iterator[tuple[str, LoadOptions]]:
    shape = sizes.needs("store").shape
    now_tok = options.ctx_size or shape.max_context_tok
    shorter = [tok for tok in _SHORTER_CONTEXTS_TOK if tok < now_tok]
    undrafted = replace(options, records="whole", base_memory=None, k=0)
    for tok in shorter:
        yield f"--ctx-size {tok}", replace(options, ctx_size=tok)
    if options.mode == "on_demand":
        return
    if not sizes.is_plain:
        yield "--base-memory 0 --k 0", undrafted
        for tok in shorter:
            yield f"--base-memory 0 --k 0 --ctx-size {tok}", replace(undrafted, ctx_size=tok)
    on_demand = replace(options, mode="on_demand", k="auto", k_min=0, records="auto", base_memory=None, rows=None)
    for tok in shorter[-1:]:
        yield f"--mode on_demand --ctx-size {tok}", replace(on_demand, ctx_size=tok)


def _least_bytes(sizes: ModelSizes, options: LoadOptions) -> int:
    return min(least_memory_bytes(sizes.needs(choice.records), choice) for choice in record_choices(sizes, options))


def _fits(sizes: ModelSizes, options: LoadOptions, machine: Machine) -> bool:
    try:
        plan_for(sizes, options, machine)
    except BudgetError:
        return False
    return True
