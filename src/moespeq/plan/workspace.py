"""Device memory that is neither weights, cache nor slots: each use as its own figure, with what it follows from.

T: rows of the longest prefill chunk; R: row bucket; H hidden; I intermediate; K experts a token; V vocabulary;
B: length.
"""

from __future__ import annotations

from dataclasses import dataclass

from moespeq.buckets import PROMPT_ROWS, LengthBuckets
from moespeq.config import LoadOptions, format_bytes
from moespeq.types import ModelShape, VisionShape

__all__ = ["Figure", "cuda_scratch_bytes", "most_image_tok", "workspace"]

_BF16_BYTES, _FLOAT_BYTES = 2, 4
_ACTIVATION_COPIES = 8  # [T, H] tensors alive at once in a decoder layer's forward
_LOGIT_COPIES = 2  # float32 [R, V] alive at once while a round is accepted
_VISION_COPIES = 8  # [patches, hidden] tensors alive at once in a layer of the tower, and the pixels
_MOST_IMAGE_TOK = 2048
_SCRATCH_COPIES = 4  # bf16 copies of one expert while its record is decoded
_PLAIN_SCRATCH_COPIES = 11  # while a GPU decodes it into a plain record, whose places and indices are wide integers
_EAGER_SCRATCH_COPIES = 2  # on a GPU without graphs: the next is decoded while the last is held
_PREFILL_SCRATCH_BYTES = 64 << 20  # 5 to 10 experts 2048 wide: a tile for every multiprocessor, and mostly in its cache
_GRAPH_COPIES = 24  # [R, H] tensors alive at once inside a graph; all graphs share one pool
_MOST_MASK_ROWS = 1024  # of a few rows' mask, once for each query head of a key head
_GRAPH_BYTES = 256 << 10  # what the driver keeps of one graph that is ready to launch
_CONTEXT_BYTES = 880 << 20  # on an H200: the context 617 MiB, cuBLAS and attention 106, our kernels and graphs the rest
_POOL_BYTES = 128 << 20  # whole segments of 2 and 20 MiB, of which the last are half empty


@dataclass(frozen=True, slots=True)
class Figure:
    """One use of memory."""

    name: str
    num_bytes: int
    reason: str


def workspace(shape: ModelShape, options: LoadOptions, context_tok: int) -> tuple[Figure, ...]:
    """What the passes need beside weights, cache and slots, on the device that `options` name."""
    rows = max(min(options.prefill_rows, context_tok), options.row_bucket)
    hidden_bytes = rows * shape.hidden_size * _BF16_BYTES
    figures = (
        Figure(
            "activations",
            hidden_bytes * (_ACTIVATION_COPIES + shape.top_k),
            f"what a layer holds at once of {rows} tokens of a prompt",
        ),
        Figure("mask", rows * context_tok * _BF16_BYTES, f"which of {context_tok} positions each of them may look at"),
        Figure(
            "logits",
            options.row_bucket * shape.vocab_size * _FLOAT_BYTES * _LOGIT_COPIES,
            f"scores of {shape.vocab_size} tokens for each of {options.row_bucket} rows of a round",
        ),
        _scratch(shape, options),
        *_vision(shape.vision, most_image_tok(options, context_tok)),
    )
    return figures + _cuda_workspace(shape, options, context_tok, rows) if options.device == "cuda" else figures


def most_image_tok(options: LoadOptions, context_tok: int) -> int:
    """The most tokens of one image: a chunk of a prompt holds it whole, and the context more than it."""
    return min(options.prefill_rows, context_tok // 2, _MOST_IMAGE_TOK)


def _vision(shape: VisionShape | None, image_tok: int) -> tuple[Figure, ...]:
    """What an image takes while the tower looks at it, of a model that has one; its weights are dense ones."""
    if shape is None:
        return ()
    num_patches = image_tok * shape.patches_per_tok
    num_bytes = num_patches * (_VISION_COPIES * shape.hidden_size + 2 * shape.intermediate_size) * _BF16_BYTES
    return (Figure("image", num_bytes, f"of up to {image_tok} tokens, {num_patches} patches, in a layer that sees"),)


def cuda_scratch_bytes(expert_bytes: int) -> int:
    """What a GPU keeps for decoded matrices; expert_bytes: of one expert in bf16."""
    return max(_PREFILL_SCRATCH_BYTES, _EAGER_SCRATCH_COPIES * expert_bytes)


def _scratch(shape: ModelShape, options: LoadOptions) -> Figure:
    expert_bytes = shape.weights_per_expert * _BF16_BYTES
    expert = f"of {format_bytes(expert_bytes)} in bf16"
    if options.device == "cuda" and options.records != "plain":
        num_bytes = cuda_scratch_bytes(expert_bytes)
        return Figure("scratch", num_bytes, f"decoded experts {expert}, as many at once as fit")
    copies = _PLAIN_SCRATCH_COPIES if options.records == "plain" else _SCRATCH_COPIES
    return Figure("scratch", expert_bytes * copies, f"{copies} decoded experts {expert}")


def _cuda_workspace(shape: ModelShape, options: LoadOptions, context_tok: int, chunk_rows: int) -> tuple[Figure, ...]:
    num_buckets = LengthBuckets(context_tok).count
    num_graphs = (shape.num_layers + 2) * num_buckets  # pieces of a verify pass between its layers, and a draft step
    num_graphs += (shape.num_layers + 1) * len(PROMPT_ROWS)  # pieces of a short prompt
    rows, mask_bytes = max(options.row_bucket, PROMPT_ROWS[-1]), 0
    if options.has_draft:
        num_graphs += (2 + shape.num_layers // 8) * num_buckets  # pieces of a prompt's draft
        mask_bytes = _MOST_MASK_ROWS * context_tok * _BF16_BYTES
    pool_bytes = rows * shape.hidden_size * _BF16_BYTES * _GRAPH_COPIES + mask_bytes
    intermediate = shape.matrices[-1][2]
    return (
        Figure(
            "intermediates",
            chunk_rows * shape.top_k * intermediate * _BF16_BYTES,
            f"of {chunk_rows} tokens of a prompt, between the two products of their experts",
        ),
        Figure(
            "graphs",
            pool_bytes + num_graphs * _GRAPH_BYTES,
            f"{num_graphs} recorded passes, for {num_buckets} lengths of context, and the memory they share",
        ),
        Figure("pools", _POOL_BYTES, "torch takes memory in whole segments"),
        Figure("context", _CONTEXT_BYTES, "the driver's context, kernels and libraries"),
    )
