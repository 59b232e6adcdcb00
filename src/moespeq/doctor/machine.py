"""Facts of the machine, as values: what the probes found and the checks judge. None: not known, or not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CardState", "DiskFacts", "GpuFacts", "HostFacts", "PackageFacts", "PinFacts", "Process"]


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """One package: the version here, and the range that is supported, such as ">=5.17,<5.18"."""

    name: str
    version: str | None
    supported: str
    is_supported: bool


@dataclass(frozen=True, slots=True)
class HostFacts:
    """limit_bytes: of a control group; oom_kills: in it, by the kernel, since it was made. memlock_bytes: None is none.

    container: its kind, "WSL" among them. variables: of the environment, secrets as "set".
    """

    system: str
    python: str
    cpu_nodes: tuple[int, ...]
    num_cores: int
    total_bytes: int
    free_bytes: int
    limit_bytes: int | None
    oom_kills: int
    memlock_bytes: int | None
    container: str | None
    variables: Mapping[str, str]
    unwritable: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """The disk of `folder`; is_direct: the read went around the page cache."""

    folder: str
    free_bytes: int
    read_bytes_per_s: float | None
    is_direct: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """Somebody who holds memory of a GPU; None bytes where the driver does not say."""

    pid: int
    name: str
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class CardState:
    """What NVML says of a card. Generations and widths: now, under copies, and the most that card and slot can do."""

    name: str
    driver: str
    cuda: str
    total_bytes: int
    free_bytes: int
    generation: int | None
    max_generation: int | None
    width: int | None
    max_width: int | None
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class PinFacts:
    """A piece that was pinned as a trial; refusal: the driver's reason. copy: of blocks from it, bytes a second."""

    num_bytes: int
    seconds: float
    refusal: str | None
    copy_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """refusal: why no engine can run on a GPU here; then the rest is unknown. card: None where NVML does not answer."""

    refusal: str | None
    name: str | None = None
    capability: tuple[int, int] | None = None
    numa_node: int | None = None
    copy_engines: int | None = None
    pin: PinFacts | None = None
    card: CardState | None = None
