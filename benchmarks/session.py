"""One benchmark of one shape on one machine: its options, what the machine is, and the JSON that grows phase by phase.

The file is written after every run, so that what dies late leaves the rest; a second call goes on with the file it
finds, if that measured the same, and replaces the phases it runs. Every phase keeps the commit and time it ran with.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import moespeq
from device_memory import measure_context_bytes
from moespeq.nested import Layout
from result_file import SCHEMA, check_same, read_result, write_result
from rows import ROWS
from shapes import Shape

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "numpy")


@dataclass(frozen=True, slots=True)
class Options:
    """What a call of run.py was asked for. left_out: rows that were asked for too, and why they do not run here."""

    shape: Shape
    seed: Path
    data: Path
    work: Path
    device: str
    budget_bytes: int
    rows: Sequence[str]
    left_out: Mapping[str, str]
    links: Sequence[str]
    repetitions: int
    new_tok: int
    ttft_tok: Sequence[int]
    identity: tuple[int, int]
    identity_budget_bytes: int | None
    accelerate_tok: int
    context_tok: int | None
    max_open: int
    spill: Path | None
    max_s: float
    layout: Layout

    @property
    def layouts(self) -> list[Layout]:
        """Those of the stores that the rows open; the first one's figures stand for the shape."""
        return list(dict.fromkeys([self.layout, *(ROWS[name].layout or self.layout for name in self.rows)]))

    def store(self, layout: Layout | None = None) -> Path:
        """Where the store of a layout is, by default the session's."""
        return self.work / f"{self.shape.name}.{(layout or self.layout).value}.moespeq"


class Session:
    """Options and the growing result. Raises UsageError where `out` holds a result of something else."""

    def __init__(self, options: Options, out: Path, *, commit: str | None, may_mix_commits: bool = False) -> None:
        self.options, self._out = options, out
        self._end_s = time.monotonic() + options.max_s
        self._commit = commit or _git_commit()
        known = read_result(out) if out.exists() else {}
        asked = {
            "schema": SCHEMA,
            "kind": "e2e",
            "commit": self._commit,
            "shape": options.shape.name,
            "layers": options.shape.num_layers,
            "budget_bytes": options.budget_bytes,
            "context_tok": options.context_tok,
            "seed": options.seed.resolve().name,
            "layout": options.layout.value,
        }
        self.context_bytes = measure_context_bytes()
        asked["device"] = device_facts(options.device)
        check_same(out, known, asked, may_mix_commits=may_mix_commits)
        self.result: dict[str, Any] = {
            **known,
            **asked,
            "machine": machine_facts(),
            "versions": versions(),
            "left_out": dict(options.left_out),
            "phases": known.get("phases", {}),
        }

    @property
    def is_out_of_time(self) -> bool:
        """Whether nothing new should be begun."""
        return time.monotonic() > self._end_s

    def note_interleaved(self, phase: str, rows: list[str]) -> None:
        """These rows took turns; rows that never stand together in a list did not."""
        together = self.result.setdefault("interleaved_rows", {}).setdefault(phase, [])
        if rows not in together:
            together.append(rows)

    def save(self) -> None:
        """Write everything measured so far."""
        write_result(self._out, self.result)

    def finish_phase(self, name: str, seconds: float) -> None:
        """Note that a phase is done, and write everything."""
        self.result["phases"][name] = {
            "commit": self._commit,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "device": self.result["device"]["name"],
            "seconds": round(seconds, 1),
        }
        self.save()


def device_facts(device: str) -> dict[str, Any]:
    """Name and size of what computes."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return {"name": _cpu_name(), "memory_bytes": psutil.virtual_memory().total, "cuda": None}


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what computes; None for what is not installed."""
    packages = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **packages, "moespeq": moespeq.__version__}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_commit() -> str:
    """The commit of this folder, marked when files differ from it; "unknown" outside a repository."""
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
