"""What the machine offers, and which device that makes of "auto". The one place where a device is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moespeq.config import LoadOptions
from moespeq.errors import UsageError
from moespeq.plan.profile import MachineProfile

__all__ = ["Machine", "resolve_options"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Free memory and cores. gpu_free_bytes: None where no GPU is usable; `gpu` then says why, else its name.

    is_here: False where the GPU is one that is only planned for. profile: what was measured here, or on another device
    of this machine, and the file it was read from.
    """

    host_free_bytes: int
    num_cores: int = 1
    gpu_free_bytes: int | None = None
    gpu: str = "no GPU was looked for"
    is_here: bool = True
    profile: MachineProfile | None = None
    profile_path: Path = Path()


def resolve_options(options: LoadOptions, machine: Machine) -> LoadOptions:
    """The options with a device instead of "auto"; its default row bucket follows.

    Raises UsageError when CUDA is asked for and not there, or when k does not fit the device's rows.
    """
    has_gpu = machine.gpu_free_bytes is not None
    if options.device == "cuda" and not has_gpu:
        raise UsageError(machine.gpu)
    if options.device != "auto":
        return options
    return replace(options, device="cuda" if has_gpu else "cpu")
