"""What a GPU encodes is what the CPU encodes, byte for byte, and the CPU decodes it."""

from __future__ import annotations

import pytest
import torch

from moespeq.nested import BF16_LAYOUTS, BaseFormat, Layout
from moespeq.prepare.encoder import ExpertEncoder

pytestmark = pytest.mark.gpu

FORMATS = [
    *(BaseFormat(4, group, zero_point) for group in (64, 100) for zero_point in (False, True)),
    BaseFormat(3, 64, zero_point=True),
    BaseFormat(2, 32, zero_point=False),
]


def trained_like(rows: int, cols: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(rows, 1, generator=generator) * 0.05
    return (torch.randn(rows, cols, generator=generator) * scale).bfloat16()


def any_bits(rows: int, cols: int, seed: int) -> torch.Tensor:
    """Every kind of bf16: NaN, infinities, subnormals, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, (rows, cols), generator=generator, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("weights", [trained_like, any_bits])
def test_the_gpu_writes_the_bytes_of_the_cpu(weights: object, fmt: BaseFormat, layout: Layout) -> None:
    assert callable(weights)
    with ExpertEncoder(fmt, "cpu") as cpu, ExpertEncoder(fmt, "cuda") as gpu:
        for seed, (rows, cols) in enumerate([(64, 2048), (300, 70), (7, 1), (96, 1408)]):
            matrices = [weights(rows, cols, seed), weights(cols, rows, seed + 100)]
            ours, theirs = gpu.encode(matrices, layout), cpu.encode(matrices, layout)
            assert torch.equal(ours.base, theirs.base)
            assert torch.equal(ours.record, theirs.record)
            assert (ours.base_crc32, ours.record_crc32) == (theirs.base_crc32, theirs.record_crc32)
