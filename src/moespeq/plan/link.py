"""How many guesses may wait in the link's queue: what it moves between two pumps, and what it begins at once.

While drafting, residency looks at the link once a step, so between two pumps it moves its bandwidth times a step's
time. With fewer records in its queue it runs dry; more cost a slot each. Both figures are the profile's where it has
them; on a CPU, whose disk nobody can guess, nothing is reckoned without them.
"""

from __future__ import annotations

import math

from moespeq.config import LoadOptions, format_bytes
from moespeq.plan.machine import Machine
from moespeq.plan.profile import MachineProfile

__all__ = ["plan_link_depth", "profile_of"]

_DRAFT_STEP_S = 2.5e-3  # as a graph
_LINK_BYTES_PER_S = 55e9  # PCIe 5; a slower one only has its queue a little deeper than it needs
_BEGUN = 2  # copies a GPU's link begins at once; a disk begins one a thread
_SLOT_SHARE = 10  # the queue takes at most one slot in so many
_LEAST_DISK = "two for each thread that reads"


def plan_link_depth(
    options: LoadOptions, machine: Machine, reasons: dict[str, str], *, model: str, slot_bytes: int, num_slots: int
) -> int:
    """Fetches under way up to which guesses are submitted; `model` is its name in the profile."""
    profile = profile_of(options, machine, reasons)
    times = None if profile is None else profile.times_of(model)
    is_disk = options.device == "cpu"
    begun, least = (options.link_threads, 2 * options.link_threads) if is_disk else (_BEGUN, 1)
    if is_disk and times is None:
        reasons["link_depth"] = (
            f"{least}: records fetched ahead at once, {_LEAST_DISK}{_advice(machine, profile, model)}"
        )
        return least
    bytes_per_s = _LINK_BYTES_PER_S if profile is None else _bytes_per_s(profile, slot_bytes, is_disk=is_disk)
    step_s = _DRAFT_STEP_S if times is None else times.draft_s_per_tok
    moved = math.ceil(step_s * bytes_per_s / slot_bytes)
    wanted, most = moved + begun, num_slots // _SLOT_SHARE
    depth = max(least, min(wanted, most))
    if depth == wanted:
        bound = ""
    elif depth == most:
        bound = f", but no more than a tenth of the {num_slots} slots"
    else:
        bound = f", but {_LEAST_DISK if is_disk else 'one at least'}"
    reasons["link_depth"] = (
        f"{depth}: records fetched ahead at once; at {bytes_per_s / 1e9:.1f} GB/s a draft step of "
        f"{1e3 * step_s:.2f} ms moves {moved} records of {format_bytes(slot_bytes)} and {begun} more can begin{bound}"
        f"{_advice(machine, profile, model)}"
    )
    return depth


def profile_of(options: LoadOptions, machine: Machine, reasons: dict[str, str]) -> MachineProfile | None:
    """The machine's profile, if it is of the device that computes."""
    profile, device = machine.profile, "cpu" if options.device == "cpu" else machine.gpu
    if profile is None or profile.device == device:
        return profile
    reasons["profile"] = f"{machine.profile_path} was measured on {profile.device}, not on {device}: not used"
    return None


def _bytes_per_s(profile: MachineProfile, slot_bytes: int, *, is_disk: bool) -> float:
    return profile.disk_bytes_per_s if is_disk else profile.link_bytes_per_s(slot_bytes)


def _advice(machine: Machine, profile: MachineProfile | None, model: str) -> str:
    """Where the figures are from, and how to get better ones."""
    if not machine.is_here:
        return "; guessed (`moespeq profile` on the machine with that GPU measures)"
    if profile is None:
        return "; guessed, nothing was measured here (`moespeq profile` does)"
    if profile.times_of(model) is None:
        return f"; {machine.profile_path} has no times of {model} (`moespeq profile MODEL` adds them)"
    return f"; measured, in {machine.profile_path}"
