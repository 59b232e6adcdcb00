"""How fast an engine that was planned will decode: an estimate from the machine's profile, with what it rests on.

    T_round(k) = (k + 1) draft steps + the verify, or what of its link time the draft did not hide

Hits are reckoned as if routers spread tokens evenly over experts and slots held any of them: trained routers come back
to the same ones and slots keep those used most, so a real run hits more and is faster. Owns no measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moespeq.config import LoadOptions
from moespeq.plan.depth import distinct_experts, profiled_round_s
from moespeq.plan.link import profile_of
from moespeq.plan.machine import Machine
from moespeq.plan.memory import MemoryNeeds, MemoryPlan
from moespeq.residency.roofline import expected_accepted, tokens_per_s

__all__ = ["Speed", "expected_speed"]


@dataclass(frozen=True, slots=True)
class Speed:
    """hit_share: of the experts a pass asks for. is_link_alone: nothing but the link was counted, an upper bound.

    s_per_byte: what a record's byte takes on its way to a slot. plain_tokens_per_s: of the same plan with k = 0.
    """

    k: int
    committed_per_round: float
    tokens_per_s: float
    hit_share: float
    s_per_byte: float
    is_link_alone: bool
    plain_tokens_per_s: float


def expected_speed(
    plan: MemoryPlan, needs: MemoryNeeds, options: LoadOptions, machine: Machine, *, agreement: float
) -> Speed | None:
    """The speed at the best depth, or the one asked for; agreement: the chance that a drafted token is accepted.

    None where nothing is known to reckon with: no bandwidth, or no times of a model that is all resident. Nor is it
    known how often a draft agrees that has a part of its base.
    """
    s_per_byte = _s_per_byte(plan, needs, options, machine)
    if s_per_byte is None or 0 < plan.num_bases < needs.num_records:
        return None
    hit_share = plan.num_slots / needs.num_records
    profile = profile_of(options, machine, {})
    times = None if profile is None else profile.times_of(needs.model)
    if times is None and hit_share == 1.0:
        return None
    s_per_distinct = (1.0 - hit_share) * needs.shape.num_moe_layers * needs.slot_bytes * s_per_byte
    link_s = _link_round_s(needs, s_per_distinct)
    round_s = link_s if times is None else profiled_round_s(times, needs.shape, s_per_distinct=s_per_distinct)
    depths = _depths(plan, options)
    chances = [agreement] * depths.stop
    by_depth = tokens_per_s(chances, [round_s(k) for k in range(depths.stop + 1)])
    k = max(depths, key=lambda depth: (by_depth[depth], -depth))
    return Speed(
        k=k,
        committed_per_round=expected_accepted(chances)[k] + 1.0,
        tokens_per_s=by_depth[k],
        hit_share=hit_share,
        s_per_byte=s_per_byte,
        is_link_alone=times is None,
        plain_tokens_per_s=by_depth[0],
    )


def _depths(plan: MemoryPlan, options: LoadOptions) -> range:
    if not plan.num_bases:
        return range(1)
    if options.k != "auto":
        return range(options.k, options.k + 1)
    return range(plan.depth.k_min, plan.depth.k_max + 1)


def _link_round_s(needs: MemoryNeeds, s_per_distinct: float) -> Callable[[int], float]:
    shape = needs.shape
    return lambda k: s_per_distinct * distinct_experts(k + 1, num_experts=shape.num_experts, top_k=shape.top_k)


def _s_per_byte(plan: MemoryPlan, needs: MemoryNeeds, options: LoadOptions, machine: Machine) -> float | None:
    """Over the link, and from the disk as far as host memory does not hold the records. None where not measured."""
    profile = profile_of(options, machine, {})
    paced_s = 0.0 if options.link_bytes_per_s is None else 1.0 / options.link_bytes_per_s
    if profile is None:
        return paced_s or None
    disk_share = max(0.0, 1.0 - plan.host_bytes / needs.records_bytes)
    link_s = 0.0 if plan.device == "cpu" else 1.0 / profile.link_bytes_per_s(needs.slot_bytes)
    return max(paced_s, link_s + disk_share / profile.disk_bytes_per_s)
