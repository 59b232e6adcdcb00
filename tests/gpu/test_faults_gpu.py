"""Faults of a real device, each made once: what integration/test_faults.py claims of fakes, with the driver behind it.

One engine of the demo model for all but the first test. After each fault it answers as before, with and without a
draft, and holds no more memory than it did.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moespeq
from engines import open_tight
from fake_driver import FakeDriver
from moespeq.decode import planning, tier_cuda
from moespeq.decode.engine import Engine
from moespeq.demo.assets import MODEL_FOLDER
from moespeq.errors import BudgetError, StorageError, UsageError
from moespeq.hardware.gpu import require_gpu
from moespeq.prepare import prepare_store
from moespeq.transfer import CudaPinning
from moespeq.types import FinishReason

pytestmark = pytest.mark.gpu

NUM_SLOTS = 40  # of 128 experts
CONTEXT_TOK = 2048
PROMPT = [5 + index % 200 for index in range(40)]
LONG_PROMPT = [5 + index % 200 for index in range(1500)]  # its mask alone takes megabytes
SPARE_BYTES = 4 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_store(MODEL_FOLDER, tmp_path_factory.mktemp("demo") / "store")


def opened(store: Path) -> Engine:
    return open_tight(store, NUM_SLOTS, device="cuda", ctx_size=CONTEXT_TOK, k=8)


def texts(engine: Engine) -> list[tuple[int, ...]]:
    """Of both prompts, without a draft and with one, from empty slots."""
    found = []
    for k in (0, 8):
        engine.retune(k=k)
        found += [
            engine.generate(prompt, max_new_tokens=16, ignore_eos=True).tokens for prompt in (PROMPT, LONG_PROMPT)
        ]
    return found


def allocated_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.fixture(scope="module")
def shared(store: Path) -> Iterator[Engine]:
    with opened(store) as engine:
        texts(engine)  # everything that is captured or loaded later is there now
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An engine with empty slots, which answers after the fault as before it and holds no more."""
    before, before_bytes = texts(shared), allocated_bytes()
    assert before[:2] == before[2:], "a draft changes no token"
    shared.retune(k=8)
    yield shared
    shared._parts.residency.check()
    assert texts(shared) == before
    assert allocated_bytes() <= before_bytes + SPARE_BYTES


class Refusing(CudaPinning):
    """A driver that registers no memory; copies go through its pinned buffers and are real."""

    def register(self, address: int, num_bytes: int) -> str | None:
        return "refused by the test"


def test_pinning_that_is_refused_is_said_and_changes_no_token(
    store: Path, shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered() -> list[tuple[int, ...]]:
        with opened(store) as second:
            return texts(second)

    monkeypatch.setattr(tier_cuda, "CudaPinning", Refusing)
    with pytest.warns(UserWarning, match=r"refused to pin .* \(refused by the test\); copies of the rest go through"):
        found = answered()
    assert found == texts(shared)


def take_all(allocate: Callable[[int], Any]) -> list[Any]:
    """Take what the device has left, in ever smaller pieces, until no piece is to be had."""
    held = []
    for power in range(34, 8, -1):
        try:
            while True:
                held.append(allocate(1 << power))
        except torch.OutOfMemoryError:
            continue
    return held


def test_memory_that_another_takes_in_the_middle_is_a_sentence(engine: Engine) -> None:
    stream = engine.stream(LONG_PROMPT, max_new_tokens=16, ignore_eos=True)
    torch.cuda.empty_cache()
    held = take_all(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
    try:
        with pytest.raises(BudgetError, match="ran out of memory in the middle of an answer"):
            next(stream)
    finally:
        held.clear()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("when", ["begin", "has_ended"])
def test_a_copy_that_fails_is_a_sentence(engine: Engine, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def failing(*args: Any) -> Any:
        raise RuntimeError("CUDA error: injected by the test\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(engine._parts.residency._mover._stream, when, failing)
        for _ in range(2):
            with pytest.raises(
                StorageError, match=r"could not be copied to the GPU \(CUDA error: injected by the test"
            ):
                engine.generate(PROMPT, max_new_tokens=16, ignore_eos=True)


Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def raising_at(length_tok: int, interrupt: Callable[[], object]) -> Processor:
    """A logits processor that interrupts once, inside the round that reaches `length_tok`."""
    left = [interrupt]

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] >= length_tok and left:
            left.pop()()
        return scores

    return processor


def test_ctrl_c_in_a_round_is_raised_behind_it_and_the_text_so_far_stays(engine: Engine) -> None:
    interrupt = raising_at(len(PROMPT) + 6, lambda: signal.raise_signal(signal.SIGINT))
    stream = engine.stream(PROMPT, max_new_tokens=400, ignore_eos=True, logits_processors=interrupt)
    tokens: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(token for piece in stream for token in piece.tokens)
    stream.cancel()
    assert [piece for piece in stream if piece.tokens] == []
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert list(stream.result.tokens) == tokens


def test_a_second_ctrl_c_ends_the_round_at_once(engine: Engine) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, max_new_tokens=400, logits_processors=raising_at(len(PROMPT) + 6, twice))


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"num_gpus": 0}, "No CUDA GPU is visible"),
        ({"capability": (7, 5)}, "computes no bf16"),
        ({"triton_version": "3.2.1"}, "Triton 3.2.1 is too old"),
    ],
    ids=["no GPU", "no bf16", "old triton"],
)
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_loaded(
    store: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], sentence: str
) -> None:
    before_bytes = allocated_bytes()
    for asking in (planning, tier_cuda):
        monkeypatch.setattr(asking, "require_gpu", partial(require_gpu, FakeDriver(**answers)))
    with pytest.raises(UsageError, match=sentence):
        moespeq.load(store, device="cuda")
    assert allocated_bytes() <= before_bytes
