"""Kernels alone, on this machine's GPU: draft, verify, decode, prefill at four models' shapes. A table, and JSON.

    python benchmarks/kernel_speed.py [--out kernels.json] [--shapes qwen1.5-moe phi-3.5-moe ...]

"GB/s" counts bf16 weights, 2 bytes each, whatever the records hold. Weights are random with the spread of trained
ones. Every timed run is a graph replay over more bytes than the L2 cache holds; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moespeq.kernels.chunk_table import GROUP_PAIRS, ChunkTable
from moespeq.kernels.decode import decode_expert
from moespeq.kernels.draft import draft_experts
from moespeq.kernels.geometry import READ_AHEAD_BYTES, ExpertGeometry
from moespeq.kernels.prefill import prefill_experts
from moespeq.kernels.verify import verify_experts
from moespeq.kernels.verify_table import RoutedPairs, VerifyTable
from moespeq.nested import BF16_LAYOUTS, DEFAULT_FORMAT, Layout, encode_base, encode_record, pack_base
from moespeq.plan import cuda_scratch_bytes

ROWS = 33
PAIRS_PER_EXPERT = (32, 64, 128, 256, 1024)  # of a prompt, on average
L2_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    """H, I, top-k, and how many distinct experts 33 rows of trained routes ask for in a layer."""

    hidden: int
    intermediate: int
    top_k: int
    distinct: int

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden * self.intermediate


SHAPES = {
    "qwen1.5-moe": Shape(2048, 1408, 4, 37),
    "qwen3-30b": Shape(2048, 768, 8, 68),
    "phi-3.5-moe": Shape(4096, 6400, 2, 10),
    "mixtral-8x7b": Shape(4096, 14336, 2, 7),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    report: dict[str, object] = {"kind": "micro", "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in arguments.shapes:
        report[name] = measure(name, SHAPES[name])
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))


def measure(name: str, shape: Shape) -> dict[str, float]:
    geometry = ExpertGeometry(shape.matrices, DEFAULT_FORMAT)
    generator = torch.Generator("cuda").manual_seed(0)
    bank, slots, encode_s = encode_layer(shape, geometry, generator)
    figures: dict[str, float] = {}
    for layout, seconds in encode_s.items():
        figures[f"encode_{layout.value}_gb_per_s"] = 2e-9 * shape.distinct * shape.weights_per_expert / seconds
        figures[f"bits_{layout.value}"] = 8 * slots[layout].shape[1] / shape.weights_per_expert
    figures["draft_us"] = 1e6 * time_draft(shape, geometry, bank)
    draft_bytes = shape.top_k * geometry.base_bytes
    figures["draft_gb_per_s"] = 1e-3 * draft_bytes / figures["draft_us"]  # of base records, not of bf16
    for layout in BF16_LAYOUTS:
        seconds = time_verify(shape, geometry, layout, bank, slots[layout])
        figures[f"verify_{layout.value}_us"] = 1e6 * seconds
        figures[f"verify_{layout.value}_gb_per_s"] = 2e-9 * shape.distinct * shape.weights_per_expert / seconds
        if layout is not Layout.PLAIN:
            seconds = time_decode(shape, geometry, layout, bank, slots[layout])
            figures[f"decode_{layout.value}_gb_per_s"] = 2e-9 * shape.distinct * shape.weights_per_expert / seconds
        for num_pairs in PAIRS_PER_EXPERT:
            table = f"{layout.value}_{num_pairs}_us"
            few_s, many_s = time_prompt(shape, geometry, layout, bank, slots[layout], num_pairs)
            figures |= {f"prompt_verify_{table}": 1e6 * few_s, f"prompt_prefill_{table}": 1e6 * many_s}
            num_flop = 2 * num_pairs * shape.distinct * shape.weights_per_expert
            figures[f"prompt_prefill_{layout.value}_{num_pairs}_tflop_per_s"] = 1e-12 * num_flop / many_s
    print(name, flush=True)
    for key, value in figures.items():
        print(f"  {key:32} {value:10.2f}", flush=True)
    return figures


def encode_layer(
    shape: Shape, geometry: ExpertGeometry, generator: torch.Generator
) -> tuple[torch.Tensor, dict[Layout, torch.Tensor], dict[Layout, float]]:
    """Random experts as a bank and, for each layout, slots; and the seconds that encoding residuals took."""
    bases, records = [], {layout: [] for layout in BF16_LAYOUTS}
    seconds = dict.fromkeys(Layout, 0.0)
    for _ in range(shape.distinct):
        matrices = [
            (torch.randn(size, generator=generator, device="cuda") * 0.02).to(torch.bfloat16) for size in shape.matrices
        ]
        pieces = [encode_base(matrix, geometry.fmt) for matrix in matrices]
        bases.append(pack_base(pieces))
        for layout in BF16_LAYOUTS:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            records[layout].append(encode_record(matrices, pieces, geometry.fmt, layout))
            end.record()
            end.synchronize()
            seconds[layout] += 1e-3 * begin.elapsed_time(end)
    return torch.stack(bases), {layout: as_slots(records[layout]) for layout in BF16_LAYOUTS}, seconds


def as_slots(records: Sequence[torch.Tensor]) -> torch.Tensor:
    slots = torch.zeros(
        len(records), max(record.numel() for record in records) + READ_AHEAD_BYTES, dtype=torch.uint8, device="cuda"
    )
    for slot, record in zip(slots, records, strict=True):
        slot[: record.numel()] = record
    return slots


def time_draft(shape: Shape, geometry: ExpertGeometry, bank: torch.Tensor) -> float:
    """Seconds of one layer, from a graph of several layers that read different experts."""
    hidden = torch.randn(1, shape.hidden, device="cuda").to(torch.bfloat16)
    weights = torch.rand(1, shape.top_k, device="cuda")
    layers = min(len(bank) // shape.top_k, 24)
    routes = torch.randperm(len(bank), device="cuda")[: layers * shape.top_k].view(layers, 1, shape.top_k)

    def run() -> None:
        for layer_routes in routes:
            draft_experts(hidden, layer_routes, weights, bank, first_row=0, geometry=geometry, activation="silu")

    return time_graph(run) / layers


def time_verify(
    shape: Shape, geometry: ExpertGeometry, layout: Layout, bank: torch.Tensor, slots: torch.Tensor
) -> float:
    hidden = torch.randn(ROWS, shape.hidden, device="cuda").to(torch.bfloat16)
    table = VerifyTable(len(bank), ROWS, shape.top_k, "cuda")
    pairs = RoutedPairs(spread_routes(shape))
    table.fill(pairs, pairs.experts(), pairs.experts(), pairs.experts())
    table.upload()
    products = torch.empty(ROWS * shape.top_k, shape.hidden, dtype=torch.bfloat16, device="cuda")
    inner = torch.empty(ROWS * shape.top_k, shape.intermediate, dtype=torch.bfloat16, device="cuda")
    return time_graph(
        lambda: verify_experts(
            hidden, table, slots, bank, products, inner,
            geometry=geometry, layout=layout, top_k=shape.top_k, activation="silu",
        )
    )  # fmt: skip


def time_prompt(
    shape: Shape,
    geometry: ExpertGeometry,
    layout: Layout,
    bank: torch.Tensor,
    slots: torch.Tensor,
    pairs_per_expert: int,
) -> tuple[float, float]:
    """Seconds of a layer of all experts in one wave: (verify kernels in groups, prefill kernels)."""
    num_rows = pairs_per_expert * shape.distinct // shape.top_k
    favour = np.random.default_rng(0).gamma(4.0, size=shape.distinct)  # half as much again, or half, is usual
    scores = np.log(favour) + np.random.default_rng(1).gumbel(size=(num_rows, shape.distinct))
    pairs = RoutedPairs(scores.argsort(1)[:, -shape.top_k :])
    hidden = torch.randn(num_rows, shape.hidden, device="cuda").to(torch.bfloat16)
    products = torch.empty(num_rows * shape.top_k, shape.hidden, dtype=torch.bfloat16, device="cuda")
    inner = torch.empty(num_rows * shape.top_k, shape.intermediate, dtype=torch.bfloat16, device="cuda")
    scratch = torch.empty(cuda_scratch_bytes(geometry.bf16_bytes) // 2, dtype=torch.bfloat16, device="cuda")
    seconds = []
    for group_pairs, multiply in ((GROUP_PAIRS, verify_experts), (None, partial(prefill_experts, scratch=scratch))):
        table = ChunkTable(shape.distinct, num_rows * shape.top_k, "cuda", num_waves=1, group_pairs=group_pairs)
        table.begin_layer(pairs)
        table.fill(0, pairs, pairs.experts(), pairs.experts(), pairs.experts())
        run = partial(
            multiply, hidden, table, slots, bank, products, inner,
            geometry=geometry, layout=layout, top_k=shape.top_k, activation="silu",
        )  # fmt: skip
        seconds.append(time_graph(run))
    return seconds[0], seconds[1]


def spread_routes(shape: Shape) -> np.ndarray:
    """Routes [33, K] over exactly `distinct` experts, some much more often than others."""
    random = np.random.default_rng(0)
    favour = random.gamma(1.0, size=shape.distinct) + 0.05
    routes = np.array(
        [random.choice(shape.distinct, shape.top_k, replace=False, p=favour / favour.sum()) for _ in range(ROWS)]
    )
    missing = np.setdiff1d(np.arange(shape.distinct), routes)
    common = [place for place in range(routes.size) if (routes == routes.flat[place]).sum() > 1]
    for expert in missing:
        place = next(p for p in common if (routes == routes.flat[p]).sum() > 1)
        routes.flat[place] = expert
    return routes


def time_decode(
    shape: Shape, geometry: ExpertGeometry, layout: Layout, bank: torch.Tensor, slots: torch.Tensor
) -> float:
    def run() -> None:
        for base, slot in zip(bank, slots, strict=True):
            decode_expert(slot, base, geometry=geometry, layout=layout)

    return time_graph(run)


def time_graph(run: Callable[[], None], repetitions: int = 15) -> float:
    """Median seconds of a replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
