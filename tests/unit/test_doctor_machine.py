"""Each check of the machine fires on the fact that is wrong, names its mend, and is silent on a healthy machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doctor_facts import CARD, GIB, GPU, HOST, by_check
from moespeq.doctor import Finding, Severity, exit_code_of, verdict_of
from moespeq.doctor.findings import fine, problem, skipped, warning
from moespeq.doctor.gpu_checks import check_gpu
from moespeq.doctor.machine import DiskFacts, GpuFacts, PackageFacts, PinFacts, Process
from moespeq.doctor.machine_checks import check_disk, check_host, check_packages
from moespeq.doctor.machine_probe import probe_disk, probe_host, probe_packages

DISK = DiskFacts("/data", 500 * GIB, 3e9, is_direct=True)


def test_a_healthy_machine_has_nothing_but_ok() -> None:
    packages = check_packages([PackageFacts("torch", "2.11.0", ">=2.11", is_supported=True)])
    findings = [packages, *check_host(HOST), *check_disk(DISK), *check_gpu(GPU, HOST)]
    by_check(findings)
    assert {finding.severity for finding in findings} == {Severity.FINE}
    assert exit_code_of(findings) == 0
    assert verdict_of(findings) == f"nothing wrong was found ({len(findings)} checks)"


def test_the_worst_finding_decides_the_exit_code_and_the_verdict_counts() -> None:
    mild, bad = warning("a", "1", "so", "do"), problem("b", "2", "so", "do")
    assert exit_code_of([fine("c", "3"), mild]) == 1
    assert exit_code_of([bad, mild]) == 2
    assert exit_code_of([skipped("d", "no")]) == 0
    assert verdict_of([bad, mild, mild, skipped("d", "no")]) == "1 problem and 2 warnings (3 checks, 1 not checked)"


def test_a_package_out_of_range_or_missing_is_a_problem_with_the_command() -> None:
    wrong = [
        PackageFacts("transformers", "4.50", ">=5.17,<5.18", is_supported=False),
        PackageFacts("torch", None, ">=2.11", is_supported=False),
    ]
    found = check_packages(wrong)
    assert found.severity is Severity.PROBLEM
    assert found.remedy == "pip install 'transformers>=5.17,<5.18' 'torch>=2.11'"
    assert check_packages([]).severity is Severity.SKIPPED


@pytest.mark.parametrize(
    ("check", "changes", "severity", "words"),
    [
        ("host memory", {"free_bytes": 5 * GIB}, Severity.WARNING, "--host-memory"),
        ("host memory", {"free_bytes": GIB, "limit_bytes": 16 * GIB}, Severity.WARNING, "--host-memory"),
        ("out-of-memory kills", {"oom_kills": 2}, Severity.WARNING, "container a higher memory limit"),
        ("environment", {"unwritable": {"HF_HOME": "/root/x"}}, Severity.PROBLEM, "export HF_HOME=FOLDER"),
    ],
)
def test_a_host_in_trouble_is_told(check: str, changes: dict[str, Any], severity: Severity, words: str) -> None:
    found = by_check(check_host(replace(HOST, **changes)))[check]
    assert found.severity is severity
    assert found.remedy is not None
    assert words in found.remedy


def test_a_limit_that_leaves_enough_is_no_warning() -> None:
    host = replace(HOST, free_bytes=8 * GIB, limit_bytes=16 * GIB)
    assert by_check(check_host(host))["host memory"].severity is Severity.FINE


def test_a_full_and_a_slow_disk_are_told_and_an_unreadable_one_is_not_judged() -> None:
    full = by_check(check_disk(replace(DISK, free_bytes=GIB)))
    assert full["disk space"].severity is Severity.WARNING
    slow = by_check(check_disk(replace(DISK, read_bytes_per_s=1e8)))
    assert slow["disk speed"].severity is Severity.WARNING
    unread = by_check(check_disk(replace(DISK, read_bytes_per_s=None, error="No file can be written.")))
    assert unread["disk speed"] == Finding("disk speed", Severity.SKIPPED, "No file can be written.")


def test_without_a_gpu_it_says_what_is_not_checked() -> None:
    found = by_check(check_gpu(GpuFacts("torch is built without CUDA."), HOST))["GPU"]
    assert found.severity is Severity.SKIPPED
    assert "PCIe link" in found.evidence


def test_a_gpu_that_no_engine_can_use_is_a_problem() -> None:
    found = by_check(check_gpu(GpuFacts("torch is built without CUDA.", card=CARD), HOST))["GPU"]
    assert found.severity is Severity.PROBLEM
    assert "pip install" in (found.remedy or "")


def test_a_driver_that_does_not_say_is_not_judged() -> None:
    gpu = replace(GPU, card=None, numa_node=None, copy_engines=None, pin=None)
    found = by_check(check_gpu(gpu, HOST))
    assert {check for check, one in found.items() if one.severity is Severity.SKIPPED} == set(found) - {"GPU"}
    virtual = by_check(check_gpu(replace(GPU, card=replace(CARD, width=None)), HOST))
    assert virtual["PCIe link"].severity is Severity.SKIPPED
    assert virtual["link speed"].severity is Severity.FINE


HOLDER = (Process(77, "python", 100 * GIB),)


@pytest.mark.parametrize(
    ("check", "gpu", "evidence", "remedy"),
    [
        (
            "device memory",
            replace(GPU, card=replace(CARD, free_bytes=30 * GIB, processes=HOLDER)),
            "held by python (77) 100.00 GiB",
            "--device-memory 28.50GiB",
        ),
        ("PCIe link", replace(GPU, card=replace(CARD, width=8)), "generation 5 x8", "slot with all lanes"),
        ("PCIe link", replace(GPU, card=replace(CARD, generation=3)), "generation 3 x16", "BIOS"),
        ("link speed", replace(GPU, pin=PinFacts(1 << 27, 0.01, None, 20e9)), "20.0 GB/s", "numactl"),
        ("copy engines", replace(GPU, copy_engines=0), "0 beside", "MIG"),
        ("NUMA", replace(GPU, numa_node=1), "node 1, this process runs on node 0", "numactl --cpunodebind=1"),
    ],
)
def test_what_slows_a_gpu_is_told(check: str, gpu: GpuFacts, evidence: str, remedy: str) -> None:
    found = by_check(check_gpu(gpu, HOST))[check]
    assert found.severity is Severity.WARNING
    assert evidence in found.evidence
    assert remedy in (found.remedy or "")


def test_refused_pinning_is_a_problem_with_the_limit_and_the_command() -> None:
    gpu = replace(GPU, pin=PinFacts(1 << 27, 0.0, "out of memory"))
    found = by_check(check_gpu(gpu, replace(HOST, container="WSL", memlock_bytes=64 << 10)))
    assert found["pinning"].severity is Severity.PROBLEM
    assert "64.00 KiB" in found["pinning"].evidence
    assert (found["pinning"].remedy or "").startswith("ulimit -l unlimited")
    assert found["link speed"].severity is Severity.SKIPPED


def test_a_link_is_judged_by_its_own_lanes() -> None:
    slower = replace(CARD, generation=4, max_generation=4)
    gpu = replace(GPU, card=slower, pin=PinFacts(1 << 27, 0.01, None, 25e9))
    assert by_check(check_gpu(gpu, HOST))["link speed"].severity is Severity.FINE


def test_the_host_is_asked_and_secrets_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-999\n")
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("\n")
    (tmp_path / "file").write_text("")
    environ = {"HF_TOKEN": "secret", "HF_HOME": str(tmp_path / "file"), "HF_HUB_CACHE": str(tmp_path / "new" / "one")}
    host = probe_host(environ | {"PATH": "/bin", "KUBERNETES_SERVICE_HOST": "1"}, tmp_path)
    assert host.cpu_nodes == (0,)
    assert host.variables["HF_TOKEN"] == "set"
    assert "PATH" not in host.variables
    assert set(host.unwritable) == {"HF_HOME"}
    assert host.container == "a Kubernetes pod"
    assert 0 < host.free_bytes <= host.total_bytes
    assert probe_host(os.environ).num_cores >= 1


def test_versions_are_held_against_what_the_package_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["torch>=2.11", "transformers<5.18,>=5.17", 'ruff>=1; extra == "dev"', "rich>=1", "?"]
    here = {"torch": "2.12.0+cu130", "transformers": "4.50.0", "triton": "3.2.0"}
    monkeypatch.setattr("importlib.metadata.requires", lambda _: asked)
    monkeypatch.setattr("importlib.metadata.version", here.__getitem__)
    found = {package.name: package.is_supported for package in probe_packages()}
    assert found == {"torch": True, "transformers": False, "triton": False}


def test_a_tree_that_is_not_installed_asks_for_nothing() -> None:
    assert probe_packages("no-such-package-as-this") == ()


def test_the_disk_is_read_and_what_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    records = tmp_path / "experts.bin"
    records.write_bytes(bytes(1 << 20))
    disk = probe_disk(tmp_path, records)
    assert disk.read_bytes_per_s is not None
    assert disk.free_bytes > 0
    refused = probe_disk(records / "inside")
    assert refused.read_bytes_per_s is None
    assert "No file can be written" in (refused.error or "")
