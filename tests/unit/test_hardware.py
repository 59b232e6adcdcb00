"""Free host memory is what the system and every limit above the process leave, reclaimable page cache included."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moespeq.hardware.memory import available_host_bytes, host_limit_bytes, oom_kills

GIB = 2**30


@pytest.fixture(autouse=True)
def _roomy_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB, total=128 * GIB))


def group(folder: Path, **figures: int | str) -> Path:
    """Write the files of one control group; `memory_max` becomes memory.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{figure}\n")
    return folder


def available(root: Path, *lines: str) -> int:
    """Free bytes of a process whose /proc/self/cgroup has these lines."""
    own = root / "own"
    own.write_text("".join(f"{line}\n" for line in lines or ("0::/",)))
    return available_host_bytes(root, own)


def test_without_control_groups_the_system_decides(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path / "none", tmp_path / "none") == 64 * GIB
    assert available(tmp_path) == 64 * GIB


def test_an_unlimited_group_leaves_it_to_the_system(tmp_path: Path) -> None:
    group(tmp_path, memory_max="max", memory_current=GIB)
    assert available(tmp_path) == 64 * GIB


def test_a_limit_leaves_what_is_not_used(tmp_path: Path) -> None:
    group(tmp_path, memory_max=4 * GIB, memory_current=GIB)
    assert available(tmp_path) == 3 * GIB


def test_page_cache_counts_as_free_because_the_kernel_drops_it(tmp_path: Path) -> None:
    stat = f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB // 2}\nslab 5"
    group(tmp_path, memory_max=4 * GIB, memory_current=4 * GIB, memory_stat=stat)
    assert available(tmp_path) == 2 * GIB + GIB // 2


def test_a_limit_anywhere_above_the_process_binds_it(tmp_path: Path) -> None:
    group(tmp_path / "jobs" / "7" / "step", memory_max="max", memory_current=GIB)
    group(tmp_path / "jobs" / "7", memory_max=3 * GIB, memory_current=GIB)
    group(tmp_path / "jobs" / "8", memory_max=GIB, memory_current=GIB)
    assert available(tmp_path, "0::/jobs/7/step") == 2 * GIB


def test_groups_of_the_first_version_are_read_under_their_own_names(tmp_path: Path) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    figures = {"memory_limit_in_bytes": 4 * GIB, "memory_usage_in_bytes": 2 * GIB, "memory_stat": stat}
    group(tmp_path / "memory" / "box", **figures)
    assert available(tmp_path, "5:cpu,memory:/box", "4:devices:/", "0::/") == 3 * GIB
    assert available(tmp_path, "5:cpu:/box", "0::/") == 64 * GIB


def test_a_path_of_another_namespace_stands_for_the_root(tmp_path: Path) -> None:
    group(tmp_path, memory_max=4 * GIB, memory_current=GIB)
    assert available(tmp_path, "0::/../../elsewhere") == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing_and_not_less(tmp_path: Path) -> None:
    group(tmp_path, memory_max=GIB, memory_current=2 * GIB, memory_stat="anon 1")
    assert available(tmp_path) == 0


def test_a_limit_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    group(tmp_path, memory_max=1024 * GIB, memory_current=0)
    assert available(tmp_path) == 64 * GIB


@pytest.mark.parametrize("damage", ["", "unlimited", "-1"])
def test_an_unreadable_figure_leaves_it_to_the_system(tmp_path: Path, damage: str) -> None:
    group(tmp_path, memory_max=damage, memory_current=1)
    assert available(tmp_path) == 64 * GIB
    group(tmp_path, memory_max=1, memory_current=damage)
    assert available(tmp_path) == 64 * GIB


def test_this_machine_has_memory() -> None:
    assert available_host_bytes() > 0


def test_the_smallest_limit_is_found_and_one_that_binds_nothing_is_none(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/jobs/7\n")
    group(tmp_path / "jobs" / "7", memory_max=2 * GIB)
    group(tmp_path / "jobs", memory_max="max")
    assert host_limit_bytes(tmp_path, own) == 2 * GIB
    group(tmp_path / "jobs" / "7", memory_max=999 * GIB)
    assert host_limit_bytes(tmp_path, own) is None


def test_processes_that_the_kernel_ended_for_memory_are_counted(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert oom_kills(tmp_path, own) == 0
    group(tmp_path, memory_events="low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path, own) == 2
