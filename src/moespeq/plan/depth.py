"""How deep a draft may be before a round was measured: k_SLO from a latency budget, and caution on a slow link.

`itl_budget_ms` bounds the longest wait between two bursts of tokens that someone who reads along has to bear. A round
commits its tokens together, so that wait is a round: k + 1 draft steps, a verify, and what of the link they do not
hide. k_SLO is the deepest k whose round the profile puts within the budget; from then on the governor holds measured
rounds against it. (The first token comes from the prompt alone and waits for no draft: a budget for it bounds no k.)
The link's part is reckoned from above: routers that spread evenly ask for more distinct experts than trained ones.

On a link as slow as PCIe 3 nothing deeper than `_SLOW_LINK_K` is tried until that depth is the best of those measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moespeq.config import LoadOptions
from moespeq.plan.link import profile_of
from moespeq.plan.machine import Machine
from moespeq.plan.profile import ModelTimes
from moespeq.types import ModelShape

__all__ = ["DepthLimits", "deepest_within", "distinct_experts", "plan_depth", "profiled_round_s"]

_SLOW_LINK_BYTES_PER_S = 14e9  # between PCIe 3 and PCIe 4, 16 lanes each
_SLOW_LINK_K = 8


@dataclass(frozen=True, slots=True)
class DepthLimits:
    """What bounds the governor: k_min..k_max, and a depth to stay within until it is the best one measured.

    round_budget_s: the longest a round may take, as measured.
    """

    k_min: int
    k_max: int
    advised_k: int | None = None
    round_budget_s: float | None = None


def plan_depth(
    options: LoadOptions,
    machine: Machine,
    reasons: dict[str, str],
    *,
    shape: ModelShape,
    model: str,
    slot_bytes: int,
    num_slots: int,
) -> DepthLimits:
    """`model` is the store's name, as a profile has it. A reason is given where more than the rows bounds k."""
    most = options.row_bucket - 1
    if not options.has_draft or most == 0:
        return DepthLimits(0, most)
    profile = profile_of(options, machine, reasons)
    times = None if profile is None else profile.times_of(model)
    rates = [] if options.link_bytes_per_s is None else [options.link_bytes_per_s]
    if profile is not None:
        is_disk = options.device == "cpu"
        rates.append(profile.disk_bytes_per_s if is_disk else profile.link_bytes_per_s(slot_bytes))
    link_bytes_per_s = min(rates) if rates else None
    k_max = most
    if options.itl_budget_ms is not None and (times is None or link_bytes_per_s is None):
        reasons["k_max"] = f"{most}: rounds are held to {options.itl_budget_ms:g} ms as they are measured"
    elif options.itl_budget_ms is not None and times is not None and link_bytes_per_s is not None:
        missing_share = 1.0 - num_slots / (shape.num_moe_layers * shape.num_experts)
        s_per_distinct = missing_share * shape.num_moe_layers * slot_bytes / link_bytes_per_s
        round_s = profiled_round_s(times, shape, s_per_distinct=s_per_distinct)
        k_max = deepest_within(options.itl_budget_ms / 1e3, round_s, k_min=options.k_min, k_max=most)
        reasons["k_max"] = (
            f"{k_max}: its round takes {1e3 * round_s(k_max):.0f} ms by {machine.profile_path}, "
            f"and the wait between two bursts of tokens may be {options.itl_budget_ms:g} ms"
        )
    return DepthLimits(
        k_min=options.k_min,
        k_max=k_max,
        advised_k=_advised_k(options, k_max, link_bytes_per_s, reasons),
        round_budget_s=None if options.itl_budget_ms is None else options.itl_budget_ms / 1e3,
    )


def _advised_k(options: LoadOptions, k_max: int, link_bytes_per_s: float | None, reasons: dict[str, str]) -> int | None:
    """Of a bus; beside what a disk takes for its bytes, draft steps cost next to nothing."""
    if options.device != "cuda" or link_bytes_per_s is None or link_bytes_per_s >= _SLOW_LINK_BYTES_PER_S:
        return None
    advised_k = max(_SLOW_LINK_K, options.k_min)
    if advised_k >= k_max:
        return None
    if options.k == "auto":
        rate = f"{link_bytes_per_s / 1e9:.1f} GB/s"
        reasons["k"] = f"auto, at most {advised_k} on a link of {rate} until that is the best depth measured"
    return advised_k


def profiled_round_s(times: ModelTimes, shape: ModelShape, *, s_per_distinct: float) -> Callable[[int], float]:
    """T_round(k) by a profile. s_per_distinct: link time of one distinct expert in every layer, residents left out."""

    def round_s(k: int) -> float:
        draft_s = (k + 1) * times.draft_s_per_tok if k else 0.0
        link_s = s_per_distinct * distinct_experts(k + 1, num_experts=shape.num_experts, top_k=shape.top_k)
        verify_s = _interpolated(times.verify_s, k + 1)
        return draft_s + max(verify_s, verify_s + link_s - draft_s)

    return round_s


def distinct_experts(rows: int, *, num_experts: int, top_k: int) -> float:
    """Distinct experts a layer is asked for by so many rows, if its router spread them evenly."""
    return float(num_experts * (1.0 - (1.0 - top_k / num_experts) ** rows))


def deepest_within(budget_s: float, round_s: Callable[[int], float], *, k_min: int, k_max: int) -> int:
    """k_SLO: the deepest k whose round, and every shallower one's, stays within the budget; k_min where none does."""
    k = k_min
    while k < k_max and round_s(k + 1) <= budget_s:
        k += 1
    return k


def _interpolated(by_rows: Mapping[int, float], rows: int) -> float:
    """Linear between measured row counts, level outside them."""
    known = sorted(by_rows)
    at = bisect_left(known, rows)
    if at == 0 or at == len(known):
        return by_rows[known[min(at, len(known) - 1)]]
    below, above = known[at - 1], known[at]
    share = (rows - below) / (above - below)
    return by_rows[below] + share * (by_rows[above] - by_rows[below])
