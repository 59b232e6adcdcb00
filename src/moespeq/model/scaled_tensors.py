"""Tensors of codes and of scales, seen as the one weight that they are; and back again, as pieces of experts.

The map of a checkpoint then sees weights only, by the names and in the shapes that transformers' model has. Scales are
checked here: their shape and dtype, and that every weight has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moespeq.errors import CheckpointError, UnsupportedModelError
from moespeq.model.quantization import Quantization
from moespeq.nested import Layout, ScaleGrid
from moespeq.store import ExpertPiece, TensorEntry
from moespeq.store.pieces import scales_of

__all__ = ["FP8_SCALES", "MXFP4_DTYPE", "ScaledWeights", "find_scaled", "layer_dtypes"]

FP8_SCALES = "_scale_inv"
MXFP4_DTYPE = "MXFP4"  # in safetensors' headers it is U8
_MXFP4_CODES, _MXFP4_SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16  # of 32 codes
_FP8_SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """entries: every tensor of a checkpoint but scales, those of codes as the weight is called and shaped; pairs: of
    such a weight, the tensors of codes and of scales.
    """

    entries: Mapping[str, TensorEntry]
    pairs: Mapping[str, tuple[str, str]]
    quantization: Quantization | None

    def split(self, pieces: Sequence[ExpertPiece]) -> tuple[tuple[ExpertPiece, ...], dict[str, ScaleGrid]]:
        """Pieces of weights as those of codes and of scales, and how scales lie over each matrix.

        Raises UnsupportedModelError where they do not lie alike in all layers.
        """
        found: list[ExpertPiece] = []
        grids: dict[str, ScaleGrid] = {}
        for piece in pieces:
            if piece.tensor not in self.pairs:
                found.append(piece)
                continue
            assert self.quantization is not None
            rows, cols = self.quantization.block
            grid = ScaleGrid(rows, cols, piece.num_rows)
            is_stacked = piece.index is not None and len(self.entries[piece.tensor].shape) < 3
            is_known = (rows == cols or self._turns or not piece.is_transposed) and not is_stacked
            if grids.setdefault(piece.matrix, grid) != grid or not is_known:
                raise UnsupportedModelError(
                    f"The scales of {piece.tensor!r} lie otherwise than other experts', and no test proves that yet."
                )
            found += _codes_and_scales(piece, self.pairs[piece.tensor], grid, is_turned=self._turns)
        return tuple(found), grids

    @property
    def _turns(self) -> bool:
        """Whether codes lie as [out, in] where the model's weight is [in, out]."""
        return self.quantization is not None and self.quantization.layout is Layout.MXFP4


def find_scaled(entries: Mapping[str, TensorEntry], quantization: Quantization | None) -> ScaledWeights:
    """Pair the tensors of a checkpoint. Raises CheckpointError for a weight without its scales."""
    if quantization is not None and quantization.layout is Layout.MXFP4:
        return _find_mxfp4(entries, quantization)
    weights = [entry for entry in entries.values() if entry.dtype == "F8_E4M3"]
    for weight in weights:
        _check_fp8(weight, entries, quantization)
    pairs = {weight.name: (weight.name, weight.name + FP8_SCALES) for weight in weights}
    scales = {name for _, name in pairs.values()}
    return ScaledWeights({name: entry for name, entry in entries.items() if name not in scales}, pairs, quantization)


def layer_dtypes(pieces: Sequence[ExpertPiece], entries: Mapping[str, TensorEntry], num_layers: int) -> tuple[str, ...]:
    """What each layer's experts are written in, by the pieces of weights. Raises UnsupportedModelError for two."""
    found: dict[int, str] = {}
    for piece in pieces:
        dtype = entries[piece.tensor].dtype
        if found.setdefault(piece.layer, dtype) != dtype:
            raise UnsupportedModelError(
                f"Expert tensor {piece.tensor!r} is {dtype} and others of its layer are {found[piece.layer]}; download "
                "it again, or use a checkpoint whose experts are of one dtype."
            )
    return tuple(found[layer] for layer in range(num_layers))


def _find_mxfp4(entries: Mapping[str, TensorEntry], quantization: Quantization) -> ScaledWeights:
    pairs = {}
    weights = dict(entries)
    for name, codes in entries.items():
        weight = name.removesuffix(_MXFP4_CODES)
        if weight == name:
            continue
        scales = entries.get(weight + _MXFP4_SCALES)
        if (
            scales is None
            or (codes.dtype, scales.dtype) != ("U8", "U8")
            or len(codes.shape) != 4
            or codes.shape != (*scales.shape, _BLOCK_BYTES)
        ):
            raise CheckpointError(f"{name!r} and its scales are no MXFP4 weights of experts; download them again.")
        num_experts, rows, blocks, _ = codes.shape
        pairs[weight] = name, scales.name
        shape = (num_experts, 2 * _BLOCK_BYTES * blocks, rows)
        weights[weight] = TensorEntry(weight, MXFP4_DTYPE, shape, codes.offset, codes.num_bytes)
        del weights[name], weights[scales.name]
    return ScaledWeights(weights, pairs, quantization)


def _check_fp8(weight: TensorEntry, entries: Mapping[str, TensorEntry], quantization: Quantization | None) -> None:
    if quantization is None:
        raise UnsupportedModelError(
            f"Tensor {weight.name!r} is FP8 and config.json has no quantization_config, which says what its scales "
            "mean; use a checkpoint in bf16, or one that has."
        )
    scales, other_name = entries.get(weight.name + FP8_SCALES), f"{weight.name.removesuffix('.weight')}.scale"
    if scales is None and other_name in entries:
        raise UnsupportedModelError(
            f"The scales of {weight.name!r} are called {other_name!r}, and only {FP8_SCALES!r} is read, as in "
            "DeepSeek-V3; use a checkpoint in bf16."
        )
    if scales is None:
        raise CheckpointError(f"The checkpoint lacks {weight.name + FP8_SCALES!r}; download it again.")
    block = quantization.block
    grid = tuple(-(-size // side) for size, side in zip(weight.shape[-2:], block, strict=False))
    if len(weight.shape) < 2 or scales.shape != (*weight.shape[:-2], *grid) or scales.dtype not in _FP8_SCALE_DTYPES:
        raise CheckpointError(
            f"{scales.name!r} is {scales.dtype} {list(scales.shape)}, which are no scales of blocks of {block[0]} x "
            f"{block[1]} of a weight of {list(weight.shape)}; check that they belong together."
        )


def _codes_and_scales(
    piece: ExpertPiece, tensors: tuple[str, str], grid: ScaleGrid, *, is_turned: bool
) -> tuple[ExpertPiece, ExpertPiece]:
    codes = replace(piece, tensor=tensors[0], is_transposed=piece.is_transposed is not is_turned)
    grid_rows, _ = grid.shape(piece.num_rows, 1)
    part = piece.row_start // piece.num_rows
    scales = replace(
        codes,
        tensor=tensors[1],
        matrix=scales_of(piece.matrix),
        row_start=part * grid_rows,
        num_rows=grid_rows,
    )
    return codes, scales
