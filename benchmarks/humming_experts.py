"""A layer of experts as humming-kernels computes it at one row, from our own codes, scales and zero points.

Owns the way to the other library: packing, its schedule, its routing tables, compiling ahead. humming is imported only
inside functions. At one row each of the K routed experts is a block of its own, so the tables are constant.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from kernel_speed import Shape
from moespeq.errors import UsageError
from moespeq.nested import Base

SILU = "a / (1.0f + __expf(-a)) * b"  # its activation is compiled from this: a is the gate, b the up projection
COMPUTE = json.dumps({"gemm_type": "indexed"})
GROUP = 64
NUM_LOCKS = 2048  # what its own layers reserve for work that several blocks share


class HummingExperts:
    """Both products of every expert; `bases` are [E] pairs (up, down)."""

    def __init__(self, bases: Sequence[Sequence[Base]], shape: Shape) -> None:
        self._ops = import_humming().ops
        up, down = zip(*bases, strict=True)
        self._up = _Product(up, shape.matrices[0], shape.top_k, inputs=1)
        self._down = _Product(down, shape.matrices[1], shape.top_k, inputs=shape.top_k)
        self._inner = torch.randn(shape.top_k, shape.intermediate, device="cuda").to(torch.bfloat16)
        self.weight_bytes = shape.top_k * (self._up.weight_bytes + self._down.weight_bytes) // len(bases)

    def up(self, hidden: Tensor, routes: Tensor) -> Tensor:
        """hidden bf16 [1, H], routes int32 [K] -> bf16 [K, 2I]."""
        return self._up(hidden, routes)

    def down(self, routes: Tensor) -> Tensor:
        """From whatever the activation last wrote: bf16 [K, H]."""
        return self._down(self._inner, routes)

    def layer(self, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
        """Both products, its activation between them, torch's sum weighted by bf16 [1, K]: bf16 [1, H]."""
        products = self.up(hidden, routes)
        self._ops.process_input(products, outputs=self._inner, activation_type="binary_split", activation_impl=SILU)
        return weights @ self.down(routes)


class _Product:
    """The indexed product with one matrix [R, C] of every expert."""

    def __init__(self, bases: Sequence[Base], size: tuple[int, int], top_k: int, inputs: int) -> None:
        from humming.forward import humming_forward
        from humming.transform import transform_humming_tensors

        tensors = {
            "weight": torch.stack([base.codes for base in bases]).view(torch.int32),  # [E, R, C / 8]
            "weight_scale": torch.stack([base.scales for base in bases]),  # [E, R, N]
        }
        if bases[0].zeros is not None:
            tensors["zero_point"] = pack_zeros(torch.stack([base.zeros for base in bases]))
        schema, tensors = _schema("zero_point" in tensors).convert_symmetric_integer_weight(tensors)
        config, schedule = _plan(schema, size, len(bases), top_k)
        tensors = transform_humming_tensors(config, tensors)
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        block = schedule["block_shape"][0]
        sorted_ids = torch.full((top_k, block), top_k, dtype=torch.int32)  # ids of top_k and more are padding
        sorted_ids[:, 0] = torch.arange(top_k)
        self._forward = humming_forward
        self._fixed = tensors | {
            "config": config,
            "outputs": torch.empty(top_k, size[0], dtype=torch.bfloat16, device="cuda"),
            "sorted_ids": sorted_ids.view(-1).cuda(),
            "num_tokens_padded": torch.tensor(top_k * block, dtype=torch.int32, device="cuda"),
            "locks": torch.zeros(NUM_LOCKS, dtype=torch.int32, device="cuda"),
            "top_k": top_k // inputs,
            "compute_config": COMPUTE,
            "tuning_config": json.dumps(schedule),
        }

    def __call__(self, inputs: Tensor, routes: Tensor) -> Tensor:
        result: Tensor = self._forward(inputs=inputs, expert_ids=routes, **self._fixed)
        return result


def import_humming() -> Any:
    try:
        import humming.ops
    except ImportError as error:
        raise UsageError(f"humming cannot be imported ({error}); run pip install humming-kernels.") from error
    return humming


def compile_ahead(shapes: Sequence[tuple[Shape, int]]) -> str:
    """Compile the products of all (shape, experts) at once, with nvcc where NVRTC fails: -> version and compiler.

    A product that fails here fails again where it is built, which says why.
    """
    humming = import_humming()
    jobs = [(shape, experts, has_zeros, matrix) for shape, experts in shapes for has_zeros in (True, False)
            for matrix in shape.matrices]  # fmt: skip
    if not _compile(jobs[0]):
        os.environ["HUMMING_COMPILER"] = "nvcc"
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(_compile, jobs))
    return f"{humming.__version__}, {os.environ.get('HUMMING_COMPILER', 'nvrtc')}"


def _compile(job: tuple[Shape, int, bool, tuple[int, int]]) -> bool:
    from humming import dtypes
    from humming.kernel.humming import HummingKernel

    shape, experts, has_zeros, size = job
    schema = _schema(has_zeros)
    if not has_zeros:
        schema.b_dtype = dtypes.float4e0m3  # sign and magnitude: what symmetric codes are converted to
    try:
        config, schedule = _plan(schema, size, experts, shape.top_k)
        HummingKernel.prepare_kernels(config.to_str(), COMPUTE, json.dumps(schedule), 0)
    except Exception:
        return False
    return True


def _schema(has_zeros: bool) -> Any:
    from humming import dtypes
    from humming.schema import HummingWeightSchema

    return HummingWeightSchema(b_dtype=dtypes.uint4, weight_scale_group_size=GROUP, has_zero_point=has_zeros)


def _plan(schema: Any, size: tuple[int, int], experts: int, top_k: int) -> tuple[Any, dict[str, Any]]:
    """humming's description of the weights and its own choice of a schedule for `top_k` routed rows."""
    from humming.transform import prepare_layer_config
    from humming.tune import get_heuristics_config

    rows, cols = size
    config = prepare_layer_config(rows, cols, schema, num_experts=experts, torch_dtype=torch.bfloat16, device=0)
    return config, get_heuristics_config(config, shape_m=top_k, gemm_type="indexed", device=0)


def pack_zeros(zeros: Tensor) -> Tensor:
    """Zero points uint8 [E, R, N] -> int32 [E, R / 8, N]: eight rows a word, the first in the lowest bits."""
    nibbles = zeros.transpose(1, 2).contiguous()
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(torch.int32).transpose(1, 2).contiguous()
