"""Facts of a healthy machine, server and run, for tests that take something away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moespeq.doctor import Finding
from moespeq.doctor.base_probe import BaseFacts
from moespeq.doctor.machine import CardState, GpuFacts, HostFacts, PinFacts
from moespeq.doctor.self_test import SelfTest
from moespeq.doctor.signals import Acceptance, Kept, QueueState, RouteCounts, Signals

__all__ = ["CARD", "GIB", "GPU", "HOST", "accepted", "by_check", "self_test_of", "signals_of"]

GIB = 2**30
HOST = HostFacts(
    system="Linux 6.1",
    python="3.12.1",
    cpu_nodes=(0,),
    num_cores=16,
    total_bytes=128 * GIB,
    free_bytes=100 * GIB,
    limit_bytes=None,
    oom_kills=0,
    memlock_bytes=None,
    container=None,
    variables={"HF_HOME": "/data/hf"},
    unwritable={},
)
CARD = CardState(
    name="NVIDIA H200",
    driver="580.1",
    cuda="13.0",
    total_bytes=140 * GIB,
    free_bytes=130 * GIB,
    generation=5,
    max_generation=5,
    width=16,
    max_width=16,
    processes=(),
)
GPU = GpuFacts(
    refusal=None,
    name="NVIDIA H200",
    capability=(9, 0),
    numa_node=0,
    copy_engines=3,
    pin=PinFacts(128 << 20, 0.01, None, 55e9),
    card=CARD,
)


def accepted(share: float, drafts: int = 100) -> Acceptance:
    """Drafts of four tokens, of which all or none is kept."""
    kept = round(share * drafts)
    return Acceptance(drafts, 4 * drafts, 4 * kept, kept)


def signals_of(**changes: Any) -> Signals:
    """A run with nothing wrong, but for `changes`."""
    healthy = Signals(
        source="the run",
        model="org/name",
        rounds=100,
        plain_rounds=0,
        acceptance=accepted(0.95),
        before=accepted(0.95),
        recent=accepted(0.95),
        hits=900,
        late=50,
        misses=50,
        link_bytes=100 * GIB,
        wasted_bytes=GIB,
        pass_s=10.0,
        draft_s=3.0,
        stall_s=1.0,
        link_busy_s=4.0,
        routes=RouteCounts(1000, 50),
        kept_in_rounds=Kept(95, 100),
        kept_on_text=Kept(96, 100),
        record_bytes=9e6,
        device="NVIDIA H200",
        k_asked="auto",
        queue=QueueState(waiting=0, running=1, request_s=2.0),
    )
    return replace(healthy, **changes)


def self_test_of(base: BaseFacts | None = None, **changes: Any) -> SelfTest:
    """A test generation that went well, but for `changes`."""
    healthy = SelfTest(
        model="name",
        device="cpu",
        k=8,
        num_tok=48,
        first_difference=None,
        num_layers=8,
        kv_differing=0,
        prefill_gap=0.0,
        acceptance=Acceptance(7, 54, 40, 7),
        routes=RouteCounts(376, 11),
        base=base or BaseFacts(16, 4, (), 0, 0, 0.09),
    )
    return replace(healthy, **changes)


def by_check(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Each check said something exactly once."""
    listed = list(findings)
    named = {finding.check: finding for finding in listed}
    assert len(named) == len(listed)
    return named
