"""What a GPU, its driver or its owner may do to an engine, each fault once: a sentence or a fallback that says what it
costs, everything given back, and an answer to the next request as before.

The faults are made by fakes of the driver behind the real transfer layer; tests/gpu/test_faults_gpu.py makes them on a
device.
"""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moespeq
from engines import memory_for, open_tight, prompts
from fake_driver import FakeDriver
from fault_engine import FaultEngine, fault_engine
from moespeq.config import LoadOptions
from moespeq.decode import planning, tier_cpu
from moespeq.decode.assembly import open_engine
from moespeq.decode.engine import Engine
from moespeq.errors import BudgetError, StorageError, UsageError
from moespeq.hardware.gpu import require_gpu
from moespeq.model.weights import ExpertWeights

NUM_SLOTS = 12
PROMPT = prompts(1)[0]
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
DRIVER_WORDS = [
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
]


def text(engine: Engine) -> tuple[int, ...]:
    return engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True).tokens


@pytest.fixture(scope="module")
def answer(tiny_store: Path) -> tuple[int, ...]:
    """Of an engine without faults."""
    with open_tight(tiny_store, NUM_SLOTS, k=0) as engine:
        return text(engine)


@pytest.fixture(params=[0, 4], ids=["plain", "speculative"])
def rig(
    request: pytest.FixtureRequest, tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultEngine]:
    """An engine that answers before the fault and after it, and holds nothing in between."""
    with fault_engine(monkeypatch, tiny_store, NUM_SLOTS, k=request.param) as opened:
        assert text(opened.engine) == answer
        yield opened
        opened.check_nothing_is_held()
        for _ in range(2):
            assert text(opened.engine) == answer
        opened.check_nothing_is_held()


@pytest.mark.parametrize("num_pinned", [0, 1])
@pytest.mark.parametrize("k", [0, 4])
def test_pinning_that_is_refused_costs_bandwidth_and_says_so(
    tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, num_pinned: int, k: int
) -> None:
    monkeypatch.setattr("moespeq.transfer.host_places._PIECE_BYTES", 1 << 16)
    threads = threading.active_count()
    with fault_engine(monkeypatch, tiny_store, NUM_SLOTS, num_pinned=num_pinned, k=k) as rig:
        assert text(rig.engine) == answer
        (warning,) = rig.warnings
        assert "The driver refused to pin host memory beyond" in warning
        assert "copies of the rest go through a small buffer, at about 8 instead of 55 GB/s" in warning
        assert rig.records.counters().pinned_bytes == sum(rig.pinning.ranges.values())
        rig.check_nothing_is_held()
        assert text(rig.engine) == answer
        pinning = rig.pinning
    assert pinning.ranges == {}
    assert threading.active_count() == threads


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("CUDA error: unspecified launch failure\nmore")])
def test_a_copy_that_fails_is_a_sentence_and_never_another_text(rig: FaultEngine, when: str, error: Exception) -> None:
    rig.engine.retune(eviction="next_use")  # empty slots: every record must come again
    rig.fail_copies(when, error)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"could not be copied to the GPU \(CUDA .* then try again\.$") as caught:
            text(rig.engine)
        assert "\n" not in str(caught.value)
        rig.check_nothing_is_held()
    rig.mend()


def test_a_copy_that_fails_now_and_then_never_gives_another_text(rig: FaultEngine, answer: tuple[int, ...]) -> None:
    rig.engine.retune(eviction="next_use")
    rig.device.end_errors[5] = RuntimeError("CUDA error: misaligned address")
    for _ in range(4):
        try:
            assert text(rig.engine) == answer
        except StorageError as error:
            assert "misaligned address" in str(error)  # noqa: PT017 - either outcome is right, a wrong text is not
        rig.check_nothing_is_held()
    rig.mend()


def test_failed_copies_give_their_places_in_host_memory_back(
    tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_engine(monkeypatch, tiny_store, NUM_SLOTS, host_bytes=6 << 14, k=4) as rig:
        assert not rig.records.holds_all
        for _ in range(3):
            rig.fail_copies("begin", OUT_OF_MEMORY)
            with pytest.raises(StorageError, match="could not be copied"):
                text(rig.engine)
            rig.mend()
            rig.check_nothing_is_held()
            assert text(rig.engine) == answer


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, *DRIVER_WORDS], ids=["torch", "triton", "cublas", "driver"])
@pytest.mark.parametrize(
    ("rig", "where"),
    [(0, "prefill"), (0, "verify"), (4, "prefill"), (4, "draft"), (4, "verify")],
    indirect=["rig"],
)
def test_memory_that_another_process_takes_in_the_middle_is_a_sentence(
    rig: FaultEngine, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    def exhausted(*args: Any, **named: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine._parts.runner, where, exhausted)
        with pytest.raises(BudgetError, match="out of memory in the middle of an answer, perhaps to another process"):
            text(rig.engine)


def test_another_error_of_the_device_is_not_taken_for_that(rig: FaultEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **named: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine._parts.runner, "verify", broken)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            text(rig.engine)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_the_link_moves_is_raised_and_nothing_stays_open(rig: FaultEngine, times: int) -> None:
    copies, left = rig.device.begun, [times]
    honest = rig.engine._parts.loop._runner.verify

    def interrupted(*args: Any) -> Any:
        for _ in range(left.pop() if left else 0):
            signal.raise_signal(signal.SIGINT)
        return honest(*args)

    rig.engine.retune(eviction="next_use")
    num_copies = len(copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.engine._parts.runner, "verify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text(rig.engine)
    assert len(copies) > num_copies
    assert not left


def test_memory_that_runs_out_between_experts_gives_their_leases_back(
    rig: FaultEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**6))
    honest = ExpertWeights.exact

    def exhausted(self: ExpertWeights, *args: Any) -> Any:
        if next(calls) == 30:
            raise OUT_OF_MEMORY
        return honest(self, *args)

    for ask in (text, lambda engine: engine.prompt_logits(PROMPT * 8)):
        calls = iter(range(10**6))
        with monkeypatch.context() as patch:
            patch.setattr(ExpertWeights, "exact", exhausted)
            with pytest.raises(BudgetError, match="ran out of memory"):
                ask(rig.engine)
        rig.check_nothing_is_held()


def test_memory_that_runs_out_while_loading_is_given_back_even_while_the_error_is_looked_at(
    tiny_store: Path, answer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Any]] = []
    threads = threading.active_count()

    def exhausted(model: Any, **named: Any) -> None:
        models.append(weakref.ref(model))
        raise BudgetError("The GPU ran out of memory.")

    memory = memory_for(tiny_store, NUM_SLOTS)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(tier_cpu, "EagerRunner", exhausted)
            open_engine(tiny_store, LoadOptions(device="cpu", device_memory=memory, k=4))
    except BudgetError:
        gc.collect()
        assert models[0]() is None, "a caller who loads less in its place needs that memory now"
        assert threading.active_count() == threads
        with open_engine(tiny_store, LoadOptions(device="cpu", device_memory=memory, k=4)) as engine:
            assert text(engine) == answer
    else:
        pytest.fail("it loaded")


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, *DRIVER_WORDS], ids=["torch", "triton", "cublas", "driver"])
def test_a_gpu_that_is_full_while_loading_is_a_sentence(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    pytest.importorskip("triton")
    from moespeq.decode import tier_cuda

    def full(*args: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(tier_cuda, "require_gpu", full)
    monkeypatch.setattr(planning, "require_gpu", partial(require_gpu, FakeDriver()))
    with pytest.raises(BudgetError, match=r"ran out of memory while loading .* smaller --device-memory") as caught:
        moespeq.load(tiny_store, device="cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"is_cuda_build": False, "torch_version": "2.13.0+cpu"}, "torch 2.13.0+cpu is built without CUDA; install"),
        ({"num_gpus": 0}, "No CUDA GPU is visible: there is none, its driver is missing, or"),
        ({"capability": (7, 5), "name": "Tesla T4"}, "The GPU Tesla T4 has compute capability 7.5, which computes no"),
        ({"triton_version": "3.2.1"}, "Triton 3.2.1 is too old for the kernels; install triton 3.3 or later"),
        ({"triton_version": None}, "Triton is not installed; install triton 3.3 or later"),
    ],
    ids=["no CUDA", "no GPU", "no bf16", "old triton", "no triton"],
)
def test_a_gpu_that_cannot_be_used_is_named_and_auto_runs_on_the_cpu_saying_why(
    tiny_store: Path,
    answer: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.setattr(planning, "require_gpu", partial(require_gpu, FakeDriver(**answers)))
    with pytest.raises(UsageError) as caught:
        moespeq.load(tiny_store, device="cuda")
    assert str(caught.value).startswith(sentence)
    assert "use --device cpu" in str(caught.value) or "or --device cpu" in str(caught.value)
    with moespeq.load(tiny_store, k=4) as engine:
        assert engine.plan.reasons["device"] == f"cpu: {caught.value}"
        assert text(engine) == answer
