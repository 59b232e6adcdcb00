"""Experts are encoded the same wherever it happens, and a GPU that cannot do it costs time, never bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import make_tiny
from moespeq.errors import UsageError
from moespeq.nested import BF16_LAYOUTS, DEFAULT_FORMAT, Layout, decode_record, split_base
from moespeq.prepare import prepare_store
from moespeq.prepare.encoder import ExpertEncoder

SHAPES = [(96, 64), (64, 48)]


@pytest.fixture
def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_an_expert_comes_back_and_its_checksums_are_its_bytes(matrices: list[Tensor], layout: Layout) -> None:
    with ExpertEncoder(DEFAULT_FORMAT, "cpu") as encoder:
        expert = encoder.encode(matrices, layout)
    bases = split_base(expert.base, SHAPES, DEFAULT_FORMAT)
    decoded = decode_record(expert.record, bases, SHAPES, DEFAULT_FORMAT, layout)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(decoded, matrices, strict=True))
    assert expert.base_crc32 == zlib.crc32(bytes(expert.base.tolist()))
    assert expert.record_crc32 == zlib.crc32(bytes(expert.record.tolist()))


def test_an_expert_that_does_not_fit_the_gpu_is_encoded_on_the_cpu(
    matrices: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExpertEncoder(DEFAULT_FORMAT, "cpu") as encoder:
        expected = encoder.encode(matrices, Layout.FIXED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    on_cpu = ExpertEncoder._encode_on
    tried = []

    def without_memory(
        self: ExpertEncoder, device: torch.device, there: Sequence[Tensor], layout: Layout
    ) -> tuple[Tensor, Tensor]:
        tried.append(device.type)
        if device.type == "cuda":
            raise torch.cuda.OutOfMemoryError
        return on_cpu(self, device, there, layout)

    monkeypatch.setattr(ExpertEncoder, "_encode_on", without_memory)
    with ExpertEncoder(DEFAULT_FORMAT, "auto") as encoder:
        found = encoder.encode(matrices, Layout.FIXED)
    assert tried == ["cuda", "cpu"]
    assert torch.equal(found.record, expected.record)
    assert torch.equal(found.base, expected.base)


def test_a_gpu_that_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"torch finds no GPU; use 'cpu', which writes the same bytes\."):
        ExpertEncoder(DEFAULT_FORMAT, "cuda")
    with pytest.raises(UsageError, match="Unknown device 'gpu'; use auto, cpu or cuda"):
        ExpertEncoder(DEFAULT_FORMAT, "gpu")


def test_a_wrong_device_leaves_nothing_behind(tmp_path: Path) -> None:
    source = make_tiny("mixtral", tmp_path / "source")
    with pytest.raises(UsageError, match="Unknown device"):
        prepare_store(source, tmp_path / "store", device="gpu")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, matrices: list[Tensor]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with ExpertEncoder(DEFAULT_FORMAT, "auto") as encoder:
        assert encoder.encode(matrices, Layout.PLAIN).record.device.type == "cpu"
