"""Experts for kernel tests: weights with every kind of bf16, their base and residual records, and a layer in slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moespeq.kernels.geometry import READ_AHEAD_BYTES, ExpertGeometry
from moespeq.kernels.verify_table import BASE_IN_SLOT, RoutedPairs, VerifyTable
from moespeq.nested import Base, BaseFormat, Layout, dequantize_base, encode_base, encode_record, pack_base

Shapes = tuple[tuple[int, int], tuple[int, int]]


def trained_like(rows: int, cols: int, seed: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator, device=device) * 0.02).to(torch.bfloat16)


def adversarial(rows: int, cols: int, seed: int, device: str = "cpu") -> torch.Tensor:
    """Weights as trained, among them zeros of both signs, NaN, infinities, subnormals, escapes and groups of zeros."""
    weight = trained_like(rows, cols, seed, device)
    generator = torch.Generator().manual_seed(seed)
    flat, order = weight.view(-1), torch.randperm(weight.numel(), generator=generator).to(device)
    special = [float("nan"), float("inf"), -float("inf"), -0.0]
    flat[order[:4]] = torch.tensor(special, dtype=torch.bfloat16, device=device)
    flat[order[4:20]] = 0.0
    flat[order[20:24]] = 1e-30
    weight[0, :64] = 0.0
    weight[rows // 2, :8] = 1e-39
    any_bits = torch.randint(-(1 << 15), 1 << 15, (4,), generator=generator).to(torch.int16)
    weight[-1, -4:] = any_bits.view(torch.bfloat16).to(device)
    return weight


def in_slot(record: torch.Tensor) -> torch.Tensor:
    """The record, and the bytes behind it that a slot keeps free."""
    return torch.nn.functional.pad(record, (0, READ_AHEAD_BYTES), value=0xA5)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.view(torch.int16), second.view(torch.int16))


@dataclass(frozen=True)
class Expert:
    matrices: list[torch.Tensor]
    bases: list[Base]
    base: torch.Tensor
    record: torch.Tensor


def make_expert(matrices: list[torch.Tensor], fmt: BaseFormat, layout: Layout) -> Expert:
    bases = [encode_base(matrix, fmt) for matrix in matrices]
    return Expert(matrices, bases, pack_base(bases), encode_record(matrices, bases, fmt, layout))


@dataclass(frozen=True)
class Layer:
    """A layer's experts, each record in the slot of its expert's complement."""

    geometry: ExpertGeometry
    layout: Layout
    experts: list[Expert]
    bank: torch.Tensor
    slots: torch.Tensor

    def table(self, routes: torch.Tensor, max_rows: int, *, experts: set[int] | None = None) -> VerifyTable:
        """A table for live routes [rows, K] and these experts only."""
        num_experts = len(self.experts)
        pairs = RoutedPairs(routes.cpu().numpy())
        wave = [expert for expert in pairs.experts() if experts is None or expert in experts]
        table = VerifyTable(num_experts, max_rows, routes.shape[1], self.bank.device)
        table.fill(pairs, wave, [num_experts - 1 - expert for expert in wave], self.bank_rows[wave])
        table.upload()
        return table

    @property
    def bank_rows(self) -> np.ndarray:
        has_base = self.slots.shape[1] > self.geometry.base_bytes + max(e.record.numel() for e in self.experts)
        return (
            np.full(len(self.experts), BASE_IN_SLOT, np.int32)
            if has_base
            else np.arange(len(self.experts), dtype=np.int32)
        )


def make_layer(
    shapes: Shapes,
    fmt: BaseFormat,
    layout: Layout,
    num_experts: int,
    *,
    device: str = "cpu",
    base_in_slot: bool = False,
) -> Layer:
    experts = [
        make_expert(
            [trained_like(*shape, seed=2 * e + i, device=device) for i, shape in enumerate(shapes)], fmt, layout
        )
        for e in range(num_experts)
    ]
    parts = [torch.cat((e.base, e.record)) if base_in_slot else e.record for e in experts]
    longest = max(part.numel() for part in parts)
    slots = torch.full((num_experts, longest + READ_AHEAD_BYTES), 0xA5, dtype=torch.uint8, device=device)
    for number, part in enumerate(parts):
        slots[num_experts - 1 - number, : part.numel()] = part
    bank = torch.stack([expert.base for expert in experts])
    return Layer(ExpertGeometry(shapes, fmt), layout, experts, bank, slots)


def random_routes(rows: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()


def exact_products(layer: Layer, hidden: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """products [T * K, H] in float32, intermediates rounded to bf16 as torch's modules do."""
    rows = []
    for pair, expert in enumerate(routes.reshape(-1).tolist()):
        up, down = layer.experts[expert].matrices
        inner = (up.float() @ hidden[pair // routes.shape[1]].float()).to(torch.bfloat16)
        gate, value = inner.chunk(2)
        rows.append(down.float() @ (torch.nn.functional.silu(gate) * value).float())
    return torch.stack(rows)


def draft_output(layer: Layer, hidden: torch.Tensor, routes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The draft's [T, H] in float64, nothing rounded but the base itself."""
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for pair, expert in enumerate(routes.reshape(-1).tolist()):
        row, slot = divmod(pair, routes.shape[1])
        shapes, fmt = layer.geometry.shapes, layer.geometry.fmt
        up, down = (
            dequantize_base(base, shape, fmt, torch.float64)
            for base, shape in zip(layer.experts[expert].bases, shapes, strict=True)
        )
        gate, value = (up @ hidden[row].double()).chunk(2)
        out[row] += weights[row, slot].double() * (down @ (torch.nn.functional.silu(gate) * value))
    return out
