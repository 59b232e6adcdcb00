"""From facts of the machine to findings, all but the GPU's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moespeq.config import format_bytes
from moespeq.doctor.findings import Finding, fine, problem, skipped, warning
from moespeq.doctor.machine import DiskFacts, HostFacts, PackageFacts

__all__ = ["check_disk", "check_host", "check_packages"]

_LEAST_FREE_SHARE = 0.1  # of host memory
_LEAST_DISK_FREE_BYTES = 10 << 30
_LEAST_DISK_BYTES_PER_S = 0.3e9  # 60 GB in more than three minutes


def check_packages(packages: Sequence[PackageFacts]) -> Finding:
    """Versions against what the package asks for; a package without a version is not installed."""
    if not packages:
        return skipped(
            "packages", "moespeq runs from a source tree that is not installed, so nothing says what it wants"
        )
    wrong = [package for package in packages if not package.is_supported]
    if not wrong:
        return fine("packages", ", ".join(f"{package.name} {package.version}" for package in packages))
    told = ", ".join(f"{one.name} {one.version or 'missing'} ({one.supported} is supported)" for one in wrong)
    wanted = " ".join(f"'{one.name}{one.supported}'" for one in wrong)
    return problem("packages", told, "versions that no test of this release ran with", f"pip install {wanted}")


def check_host(host: HostFacts) -> Iterator[Finding]:
    """System, memory, its limits, and the environment's variables."""
    where = f", in {host.container}" if host.container else ""
    yield fine("system", f"{host.system}, Python {host.python}, {host.num_cores} cores{where}")
    yield _memory(host)
    yield _kills(host)
    yield _variables(host)


def _memory(host: HostFacts) -> Finding:
    limit = "" if host.limit_bytes is None else f", a limit of {format_bytes(host.limit_bytes)}"
    told = f"{format_bytes(host.free_bytes)} free of {format_bytes(host.total_bytes)}{limit}"
    usable_bytes = min(host.total_bytes, host.limit_bytes or host.total_bytes)
    if host.free_bytes >= _LEAST_FREE_SHARE * usable_bytes:
        return fine("host memory", told)
    cause = f"less than {_LEAST_FREE_SHARE:.0%} of what this process may take is free"
    return warning("host memory", told, cause, "end what else runs, or load with a smaller --host-memory")


def _kills(host: HostFacts) -> Finding:
    if not host.oom_kills:
        return fine("out-of-memory kills", "none in this control group")
    told = f"the kernel ended {host.oom_kills} process{'es' * (host.oom_kills > 1)} of this control group for memory"
    cause = "host memory ran out: the limit of the container or batch job counts pinned records too"
    remedy = "load with a smaller --host-memory, or give the container a higher memory limit"
    return warning("out-of-memory kills", told, cause, remedy)


def _variables(host: HostFacts) -> Finding:
    if host.unwritable:
        told = ", ".join(f"{name}={folder}" for name, folder in host.unwritable.items())
        remedy = "; ".join(f"export {name}=FOLDER" for name in host.unwritable)
        return problem(
            "environment", f"{told}: cannot be written", "a folder of another user, or a read-only disk", remedy
        )
    told = ", ".join(f"{name}={value}" for name, value in host.variables.items())
    return fine("environment", told or "no variable that moespeq or Hugging Face tools read is set")


def check_disk(disk: DiskFacts) -> Iterator[Finding]:
    """Room for stores, and how fast records come from there."""
    told = f"{format_bytes(disk.free_bytes)} free in {disk.folder}"
    if disk.free_bytes >= _LEAST_DISK_FREE_BYTES:
        yield fine("disk space", told)
    else:
        remedy = "make room there, or `export MOESPEQ_CACHE=FOLDER` on another disk"
        yield warning("disk space", told, "a store is about as large as its checkpoint", remedy)
    yield _disk_speed(disk)


def _disk_speed(disk: DiskFacts) -> Finding:
    if disk.read_bytes_per_s is None:
        return skipped("disk speed", disk.error or "nothing could be read")
    way = "direct" if disk.is_direct else "through the page cache, so it may be memory's"
    told = f"{disk.read_bytes_per_s / 1e9:.2f} GB/s, {way}"
    if disk.read_bytes_per_s >= _LEAST_DISK_BYTES_PER_S:
        return fine("disk speed", told)
    cause = "a network or spinning disk; records that host memory does not hold wait for it"
    remedy = "keep stores on a local NVMe disk (`export MOESPEQ_CACHE=FOLDER`), or give more --host-memory"
    return warning("disk speed", told, cause, remedy)
