"""Which base should be the default? Bits, error and draft agreement of every candidate, on real checkpoints.

    python benchmarks/study_base.py --models DIR [DIR...] --data DIR

Per model and format: bits a weight of the base and of the residual in both layouts (tables, escapes and
alignment included, over a sample of experts), the base's relative error, and how often a model whose routed
experts are the base alone picks the next token of the bf16 model, teacher-forced over that model's greedy
answers to GSM8K questions. The promised sizes are asserted; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from moespeq.nested import (
    BaseFormat,
    Layout,
    base_record_bytes,
    dequantize_base,
    encode_base,
    encode_record,
    residual_bits,
)

PROMPT_TOK = 56
MATRICES = ("gate_up_proj", "down_proj")
FORMATS = [
    *(BaseFormat(4, group, zero_point) for zero_point in (False, True) for group in (32, 64, 128)),
    *(BaseFormat(bits, 64, zero_point) for bits in (3, 2) for zero_point in (False, True)),
]
LAYOUTS = (Layout.FIXED, Layout.CODE_WIDTH)
BOUNDS = {
    (4, Layout.FIXED): 9.0,
    (3, Layout.FIXED): 9.6,
    (2, Layout.FIXED): 11.4,
    (4, Layout.CODE_WIDTH): 8.0,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One model and format: bits are per routed weight."""

    model: str
    base: str
    base_bits: float
    fixed_bits: float
    code_width_bits: float
    relative_error: float
    agreement: float


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="holds GSM8K's test.jsonl")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=2, help="experts a layer whose records are measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    started_s = time.monotonic()
    print("| model | base | base bits | nested bits | code-width bits | relative error | agreement |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for path in args.models:
        for row in study_model(path, args):
            rows.append(row)
            print(
                f"| {row.model} | {row.base} | {row.base_bits:.3f} | {row.fixed_bits:.3f} "
                f"| {row.code_width_bits:.3f} | {row.relative_error:.4f} | {row.agreement:.4f} |",
                flush=True,
            )
    print_means(rows)
    elapsed_s = round(time.monotonic() - started_s)
    print(json.dumps({"elapsed_s": elapsed_s, "rows": [asdict(row) for row in rows]}))


def study_model(path: Path, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row a format; the model's experts are replaced and restored in place."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(args.device).eval()
    answers = greedy_answers(model, load_prompts(path, args).to(args.device), args.tokens)
    reference = next_tokens(model, answers)
    experts = [module for module in model.modules() if all(hasattr(module, matrix) for matrix in MATRICES)]
    originals = [[getattr(module, matrix).data for matrix in MATRICES] for module in experts]
    for fmt in FORMATS:
        fixed, code_width = (measure_bits(originals, fmt, layout, args.experts) for layout in LAYOUTS)
        error = replace_experts(experts, originals, fmt)
        agreement = (next_tokens(model, answers) == reference).float().mean().item()
        shapes = matrix_shapes(originals)
        base_bits = residual_bits(base_record_bytes(shapes, fmt), shapes)
        yield Row(path.name, describe(fmt), base_bits, fixed, code_width, error, agreement)


def describe(fmt: BaseFormat) -> str:
    """Short name of a format."""
    return f"{fmt.bits}-bit {'asym' if fmt.zero_point else 'sym'} G{fmt.group}"


def load_prompts(path: Path, args: argparse.Namespace) -> Tensor:
    """Return token ids [prompts, PROMPT_TOK]: the ends of the first questions that are long enough."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    with (args.data / "test.jsonl").open() as lines:
        questions = [json.loads(line)["question"].strip() for line in lines]
    encoded = (tokenizer(f"Question: {question}\nAnswer:")["input_ids"] for question in questions)
    ends = [ids[-PROMPT_TOK:] for ids in encoded if len(ids) >= PROMPT_TOK]
    return torch.tensor(ends[: args.prompts])


@torch.inference_mode()
def greedy_answers(model: nn.Module, prompts: Tensor, num_tokens: int) -> Tensor:
    """Return prompts and their greedy continuations, [prompts, PROMPT_TOK + num_tokens]."""
    answers: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return answers


@torch.inference_mode()
def next_tokens(model: nn.Module, answers: Tensor) -> Tensor:
    """Return the model's choice after each position of the answers, [prompts, num_tokens]."""
    logits: Tensor = model(input_ids=answers).logits
    return logits[:, PROMPT_TOK - 1 : -1].argmax(-1)


def matrix_shapes(originals: list[list[Tensor]]) -> list[tuple[int, int]]:
    """Shapes of one expert's matrices."""
    return [(stack.shape[1], stack.shape[2]) for stack in originals[0]]


def measure_bits(originals: list[list[Tensor]], fmt: BaseFormat, layout: Layout, num_experts: int) -> float:
    """Return the mean residual bits over evenly spaced experts of every layer, and assert the promise."""
    shapes = matrix_shapes(originals)
    measured = []
    for stacks in originals:
        step = max(1, stacks[0].shape[0] // num_experts)
        for expert in range(0, stacks[0].shape[0], step):
            weights = [stack[expert] for stack in stacks]
            record = encode_record(weights, [encode_base(weight, fmt) for weight in weights], fmt, layout)
            measured.append(residual_bits(record.numel(), shapes))
    mean = sum(measured) / len(measured)
    bound = BOUNDS.get((fmt.bits, layout))
    assert bound is None or mean <= bound, (describe(fmt), layout, mean, bound)
    return mean


def replace_experts(experts: list[nn.Module], originals: list[list[Tensor]], fmt: BaseFormat) -> float:
    """Give every routed expert its base's weights; return the root of lost over whole energy."""
    lost, whole = 0.0, 0.0
    for module, stacks in zip(experts, originals, strict=True):
        for matrix, stack in zip(MATRICES, stacks, strict=True):
            weight = stack.reshape(-1, stack.shape[-1])
            shape = (weight.shape[0], weight.shape[1])
            centre = dequantize_base(encode_base(weight, fmt), shape, fmt)
            lost += (weight.float() - centre.float()).square().sum().item()
            whole += weight.float().square().sum().item()
            getattr(module, matrix).data = centre.view(stack.shape)
    return float((lost / whole) ** 0.5)


def print_means(rows: list[Row]) -> None:
    """Print each format's mean over the models."""
    for name in dict.fromkeys(row.base for row in rows):
        same = [row for row in rows if row.base == name]
        columns = ("base_bits", "fixed_bits", "code_width_bits", "relative_error", "agreement")
        means = [sum(getattr(row, column) for row in same) / len(same) for column in columns]
        cells = " | ".join(f"{mean:.{digits}f}" for mean, digits in zip(means, (3, 3, 3, 4, 4), strict=True))
        print(f"| mean | {name} | {cells} |")


if __name__ == "__main__":
    main()
