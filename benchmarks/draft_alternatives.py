"""Our draft kernels against humming-kernels' on the same INT4 weights: one row, K experts, one layer.

    python benchmarks/draft_alternatives.py [--out alternatives.json] [--shapes qwen1.5-moe ...] [--max-seconds 180]

Both read the very codes, scales and zero points of a base. "up" and "down" are our two launches, with activation and
weighted sum, and humming's bare products; "layer" is everything in one graph, with humming's own activation and torch's
sum. humming takes the schedule that it chooses for K rows. GB/s count the weight bytes each holds. Timing is that of
kernel_speed.py; compiling is outside. Each result is held against float32; what is refused is a row with its reason.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from humming_experts import HummingExperts, compile_ahead
from kernel_speed import SHAPES, Shape, time_graph
from moespeq.errors import UsageError
from moespeq.kernels.draft import draft_down, draft_experts, draft_up
from moespeq.kernels.geometry import ExpertGeometry
from moespeq.nested import Base, BaseFormat, dequantize_base, encode_base, pack_base, split_base

EXPERTS = {"qwen1.5-moe": 60, "qwen3-30b": 128, "phi-3.5-moe": 16, "mixtral-8x7b": 8}
FORMATS = {"zero point": BaseFormat(4, 64, True), "symmetric": BaseFormat(4, 64, False)}
RUNS = (("ours", "zero point"), ("humming", "zero point"), ("humming", "symmetric"), ("ours", "symmetric"))
MOST_PASSES = 24
LARGEST_ERROR = 0.02  # of the reference's norm: bf16 between and after the products costs about 0.004
HARD_STOP_S = 60


@dataclass(frozen=True)
class Case:
    """One layer, several passes: hidden [1, H], weights [1, K], routes [passes, K], bank uint8 [E, base bytes]."""

    shape: Shape
    geometry: ExpertGeometry
    hidden: Tensor
    weights: Tensor
    routes: Tensor
    bank: Tensor

    def bases(self, expert: int) -> list[Base]:
        return split_base(self.bank[expert], self.geometry.shapes, self.geometry.fmt)

    def reference(self) -> Tensor:
        """The first pass in float32 on the dequantized weights, bf16 between the products: [1, H]."""
        total = torch.zeros(1, self.shape.hidden, device="cuda")
        for expert, weight in zip(self.routes[0].tolist(), self.weights[0].float(), strict=True):
            up, down = (
                dequantize_base(base, size, self.geometry.fmt, torch.float32)
                for base, size in zip(self.bases(expert), self.geometry.shapes, strict=True)
            )
            gate, linear = (self.hidden.float() @ up.T).to(torch.bfloat16).float().chunk(2, dim=1)
            total += weight * ((silu(gate) * linear).to(torch.bfloat16).float() @ down.T)
        return total


def random_case(name: str, fmt: BaseFormat) -> Case:
    """Weights with the spread of trained ones; each pass routes to experts of its own."""
    shape, generator = SHAPES[name], torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(torch.bfloat16)

    bank = torch.stack(
        [pack_base([encode_base(draw(*size) * 0.02, fmt) for size in shape.matrices]) for _ in range(EXPERTS[name])]
    )
    passes = min(len(bank) // shape.top_k, MOST_PASSES)
    routes = torch.randperm(len(bank), generator=generator, device="cuda")[: passes * shape.top_k]
    weights = draw(1, shape.top_k).softmax(dim=1)
    geometry = ExpertGeometry(shape.matrices, fmt)
    return Case(shape, geometry, draw(1, shape.hidden), weights, routes.view(passes, shape.top_k), bank)


@dataclass(frozen=True)
class Layer:
    """What is timed, each from one pass's routes; weight_bytes of one pass."""

    up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], Tensor]
    routes: Sequence[Tensor]
    weight_bytes: int


def our_layer(case: Case) -> Layer:
    shape, bank, hidden, weights = case.shape, case.bank, case.hidden, case.weights
    inner = torch.randn(shape.top_k, shape.intermediate, device="cuda").to(torch.bfloat16)
    geometry = case.geometry
    return Layer(
        lambda routes: draft_up(hidden, routes, bank, first_row=0, geometry=geometry, activation="silu"),
        lambda routes: draft_down(inner, routes, weights, bank, first_row=0, geometry=geometry),
        lambda routes: draft_experts(
            hidden, routes, weights, bank, first_row=0, geometry=geometry, activation="silu"
        ),
        case.routes.unsqueeze(1).unbind(),
        shape.top_k * geometry.base_bytes,
    )  # fmt: skip


def humming_layer(case: Case) -> Layer:
    experts = HummingExperts([case.bases(expert) for expert in range(len(case.bank))], case.shape)
    return Layer(
        lambda routes: experts.up(case.hidden, routes),
        experts.down,
        lambda routes: experts.layer(case.hidden, routes, case.weights),
        case.routes.to(torch.int32).unbind(),
        experts.weight_bytes,
    )


def measure(case: Case, layer: Layer) -> dict[str, Any]:
    def time_us(run: Callable[[Tensor], Tensor]) -> float:
        return 1e6 * time_graph(lambda: [run(routes) for routes in layer.routes]) / len(layer.routes)

    expected = case.reference()
    error = ((layer.whole(layer.routes[0]).float() - expected).norm() / expected.norm()).item()
    row: dict[str, Any] = {"error": error}
    if not error < LARGEST_ERROR:
        row["reason"] = f"the result is wrong by {error:.3f} of its norm"
    row |= {"up_us": time_us(layer.up), "down_us": time_us(layer.down), "layer_us": time_us(layer.whole)}
    return row | {"gb_per_s": 1e-3 * layer.weight_bytes / row["layer_us"]}


def measure_all(names: Sequence[str], deadline_s: float) -> Iterator[dict[str, Any]]:
    """Ours first: a kernel that breaks the device spoils what comes after it."""
    version: str | None = None
    for (kernels, weights), name in product(RUNS, names):
        row: dict[str, Any] = {"shape": name, "weights": weights, "kernels": kernels}
        try:
            if time.monotonic() > deadline_s:
                raise UsageError("No time was left; raise --max-seconds.")
            if kernels == "humming":
                version = version or compile_ahead([(SHAPES[name], EXPERTS[name]) for name in names])
                row["version"] = version
            case = random_case(name, FORMATS[weights])
            row |= measure(case, our_layer(case) if kernels == "ours" else humming_layer(case))
        except Exception as error:
            traceback.print_exc()
            what = (
                str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            )  # many of humming's asserts are bare
            row["reason"] = f"{type(error).__name__}: {what}".splitlines()[0]
        yield row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a row: microseconds a layer, GB/s of weight bytes, why a shape was refused."""
    columns = (("up_us", "8.2f"), ("down_us", "8.2f"), ("layer_us", "8.2f"), ("gb_per_s", "8.0f"), ("error", "8.4f"))
    lines = [f"{'shape':14}{'weights':11}{'kernels':8}" + "".join(f"{name:>9}" for name, _ in columns)]
    for row in sorted(rows, key=lambda row: list(SHAPES).index(row["shape"])):
        cells = "".join(f" {row[name]:{form}}" for name, form in columns if "layer_us" in row)
        reason = f"  {row['reason']}" if "reason" in row else ""
        lines.append(f"{row['shape']:14}{row['weights']:11}{row['kernels']:8}{cells}{reason}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--max-seconds", type=float, default=180, help="no row begins later")
    arguments = parser.parse_args()
    deadline_s = time.monotonic() + arguments.max_seconds
    faulthandler.dump_traceback_later(arguments.max_seconds + HARD_STOP_S, exit=True)  # a kernel that never ends
    rows: list[dict[str, Any]] = []
    report = {"kind": "micro", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    for row in measure_all(arguments.shapes, deadline_s):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
