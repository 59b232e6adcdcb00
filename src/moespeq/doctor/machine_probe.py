"""Asks the machine for its facts: thin, bounded in time, and never an error where something cannot be known."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from moespeq.doctor.machine import DiskFacts, HostFacts, PackageFacts
from moespeq.errors import StorageError, UsageError
from moespeq.hardware.cores import physical_cores
from moespeq.hardware.disk import measure_reads, scratch_file
from moespeq.hardware.gpu import OLDEST_TRITON
from moespeq.hardware.memory import available_host_bytes, host_limit_bytes, oom_kills

__all__ = ["probe_disk", "probe_host", "probe_packages"]

_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "huggingface-hub")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MOESPEQ_CACHE", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
_FOLDERS = ("MOESPEQ_CACHE", "HF_HOME", "HF_HUB_CACHE")
_SECRETS = ("HF_TOKEN", "MOESPEQ_API_KEY")
_READ_BYTES = 128 << 20  # a second on a slow disk
_READ_THREADS = 4
_NODES = Path("/sys/devices/system/node")
_CONTAINER_FILES = {"/.dockerenv": "a Docker container", "/run/.containerenv": "a Podman container"}


def probe_packages(package: str = "moespeq") -> tuple[PackageFacts, ...]:
    """What the installed package asks of those it computes with, and Triton; nothing where it is not installed."""
    try:
        required = list(_requirements(importlib.metadata.requires(package) or []))
    except importlib.metadata.PackageNotFoundError:
        return ()
    found = [_package(one.name, one.specifier) for one in required if one.name in _PACKAGES]
    oldest = SpecifierSet(f">={'.'.join(map(str, OLDEST_TRITON))}")
    triton = _package("triton", oldest)
    return (*found, triton) if triton.version is not None else tuple(found)  # a CPU needs none


def _requirements(lines: list[str]) -> Iterator[Requirement]:
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None:
            yield requirement


def _package(name: str, supported: SpecifierSet) -> PackageFacts:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return PackageFacts(name, None, str(supported), is_supported=False)
    return PackageFacts(name, version, str(supported), supported.contains(version, prereleases=True))


def probe_host(environ: Mapping[str, str] = os.environ, nodes: Path = _NODES) -> HostFacts:
    """System, memory and environment of this process."""
    memlock_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    named = {name: value for name, value in sorted(environ.items()) if name in _VARIABLES or name.startswith("HF_")}
    secrets = {name: "set" for name in _SECRETS if environ.get(name)}
    return HostFacts(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        cpu_nodes=_own_nodes(nodes),
        num_cores=physical_cores(),
        total_bytes=int(psutil.virtual_memory().total),
        free_bytes=available_host_bytes(),
        limit_bytes=host_limit_bytes(),
        oom_kills=oom_kills(),
        memlock_bytes=None if memlock_bytes == resource.RLIM_INFINITY else memlock_bytes,
        container=_container(environ),
        variables=named | secrets,
        unwritable={name: environ[name] for name in _FOLDERS if name in environ and not _is_writable(environ[name])},
    )


def _own_nodes(nodes: Path) -> tuple[int, ...]:
    """Memory nodes whose processors this process may run on."""
    allowed = os.sched_getaffinity(0)
    found = {
        int(folder.name.removeprefix("node"))
        for folder in nodes.glob("node[0-9]*")
        if allowed & set(_numbers((folder / "cpulist").read_text()))
    }
    return tuple(sorted(found)) or (0,)


def _numbers(ranges: str) -> Iterator[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _container(environ: Mapping[str, str]) -> str | None:
    if "microsoft" in platform.release().lower():
        return "WSL"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "a Kubernetes pod"
    return next((kind for path, kind in _CONTAINER_FILES.items() if Path(path).exists()), None)


def _is_writable(folder: str) -> bool:
    """Whether it is a folder we may write to, or may make."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def probe_disk(folder: Path, records: Path | None = None) -> DiskFacts:
    """Of the disk that holds `folder`; read from a store's `records` where there are any, else from a scratch file."""
    try:
        if records is not None:
            rate = measure_reads(records, num_threads=_READ_THREADS, max_bytes=_READ_BYTES)
        else:
            with scratch_file(folder, _READ_BYTES) as path:
                rate = measure_reads(path, num_threads=_READ_THREADS, max_bytes=_READ_BYTES)
    except (StorageError, UsageError) as error:
        return DiskFacts(str(folder), _free_bytes(folder), None, is_direct=False, error=str(error))
    return DiskFacts(str(folder), _free_bytes(folder), rate.bytes_per_s, rate.is_direct)


def _free_bytes(folder: Path) -> int:
    path = folder.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
