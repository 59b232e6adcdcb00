"""Which tensor of a checkpoint is which rows of which routed expert, as transformers itself would load it.

The answer comes from transformers' own conversion mapping, interpreted on names and shapes instead of run on
weights: a converter stacks per-expert tensors (MergeModulelist), joins gate and up (Concatenate) and may
transpose. Nothing is guessed from names, and the result is checked: every row of every expert is covered
exactly once, and every other weight of the model has a tensor of its shape. What the model class does not load
(multi-token-prediction layers look like experts) is dense: kept, exported, never routed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from moespeq.errors import CheckpointError, MoespeqError, UnsupportedModelError
from moespeq.model.empty import empty_model
from moespeq.model.families import FAMILIES
from moespeq.model.loading import load_config, one_line
from moespeq.model.quantization import check_tensor_names
from moespeq.model.scaled_tensors import find_scaled, layer_dtypes
from moespeq.model.shims import StackedExperts
from moespeq.model.supported import check_experts, check_family, check_layer_count, read_quantization
from moespeq.model.weight_sources import UNCONVERTED, Sources, check_dense_weights, find_sources
from moespeq.nested import ScaleGrid
from moespeq.store import Checkpoint, ExpertPiece, TensorEntry

__all__ = ["CheckpointMap", "ModelOutline", "check_family", "map_checkpoint", "outline_model"]

_MATRIX_NAMES = {"gate_up_proj": "gate_up", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class CheckpointMap:
    """A checkpoint's routed experts.

    `module_names` are the experts modules in layer order; `dtypes` what their weights are written in, as safetensors
    calls it (MXFP4 has no name there); `matrices` are (name, out, in), the same for every expert; `grids` how scales
    lie over a matrix that has any; `dense` are the names of all tensors that are no piece of an expert.
    """

    model_type: str
    module_names: tuple[str, ...]
    dtypes: tuple[str, ...]
    matrices: tuple[tuple[str, int, int], ...]
    num_experts: int
    top_k: int
    pieces: tuple[ExpertPiece, ...]
    grids: Mapping[str, ScaleGrid]
    dense: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What a config alone says of a model; `matrices` are (name, out, in) of an expert, dense_weights all others."""

    matrices: tuple[tuple[str, int, int], ...]
    num_moe_layers: int
    num_experts: int
    top_k: int
    dense_weights: int


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One matrix of all experts of a layer: [E, out, in] in the model, or [E, in, out] when transposed."""

    layer: int
    matrix: str
    num_experts: int
    rows: int
    cols: int
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the model's parameter."""
        matrix = (self.cols, self.rows) if self.is_transposed else (self.rows, self.cols)
        return (self.num_experts, *matrix)


def map_checkpoint(checkpoint: Checkpoint) -> CheckpointMap:
    """Find the routed experts of a checkpoint.

    Raises UnsupportedModelError for a family or quantisation that moespeq does not take, CheckpointError when the
    config, an expert or another weight of the model is incomplete. Which dtypes are taken is not decided here.
    """
    check_family(checkpoint.folder)
    check_layer_count(checkpoint.folder, len(checkpoint.tensors))
    check_tensor_names(checkpoint.tensors)
    model = _build_empty(checkpoint.folder)
    config, modules = model.config, _experts_modules(model)
    parameters = _parameters(modules)
    tensors = {name: place.entry for name, place in checkpoint.tensors.items()}
    scaled = find_scaled(tensors, read_quantization(checkpoint.folder))
    entries = scaled.entries
    first = [parameter for parameter in parameters.values() if parameter.layer == 0]
    top_k = _top_k(model, first[0].num_experts)
    converters, sources = find_sources(model, entries)
    pieces = _find_pieces(converters, sources, parameters, entries)
    _check_coverage(pieces, parameters)
    check_dense_weights(model, parameters, sources, entries)
    stored, grids = scaled.split(pieces)
    return CheckpointMap(
        model_type=config.model_type,
        module_names=tuple(modules),
        dtypes=layer_dtypes(pieces, entries, len(modules)),
        matrices=tuple((parameter.matrix, parameter.rows, parameter.cols) for parameter in first),
        num_experts=first[0].num_experts,
        top_k=top_k,
        pieces=stored,
        grids=grids,
        dense=tuple(sorted(tensors.keys() - {piece.tensor for piece in stored})),
    )


def outline_model(folder: Path, num_tensors: int | None = None) -> ModelOutline:
    """A model's experts and the number of its other weights, by `config.json` alone. Raises as map_checkpoint."""
    check_family(folder)
    check_layer_count(folder, num_tensors)
    model = _build_empty(folder)
    modules = _experts_modules(model)
    parameters = _parameters(modules)
    first = [parameter for parameter in parameters.values() if parameter.layer == 0]
    top_k = _top_k(model, first[0].num_experts)
    return ModelOutline(
        matrices=tuple((parameter.matrix, parameter.rows, parameter.cols) for parameter in first),
        num_moe_layers=len(modules),
        num_experts=first[0].num_experts,
        top_k=top_k,
        dense_weights=sum(weights.numel() for name, weights in model.named_parameters() if name not in parameters),
    )


def _build_empty(folder: Path) -> PreTrainedModel:
    """The model of a folder's config, without memory for its weights."""
    try:
        return empty_model(load_config(folder))
    except MoespeqError:
        raise
    except Exception as error:  # Values that do not fit together fail anywhere inside the constructors.
        raise CheckpointError(
            f"{folder / 'config.json'} describes no model that can be built: {one_line(error)}"
        ) from error


def _experts_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Modules with 3-D up and down projections, in model order."""
    found = {}
    for name, module in model.named_modules():
        own = {key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3}
        if "down_proj" in own and own & {"gate_up_proj", "up_proj"}:
            found[name] = module
    if not found:
        raise UnsupportedModelError(
            f"This {model.config.model_type} model has no layer with routed experts to offload."
        )
    return found


def _parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, _Parameter]:
    """Every experts parameter by its full name; all layers must have the same shapes."""
    parameters: dict[str, _Parameter] = {}
    shapes = set()
    for layer, (name, module) in enumerate(modules.items()):
        if not hasattr(module, "is_transposed"):
            raise UnsupportedModelError(f"{type(module).__name__} does not use transformers' experts interface.")
        for key in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            num_experts, rows, cols = getattr(module, key).shape
            if module.is_transposed:
                rows, cols = cols, rows
            parameters[f"{name}.{key}"] = _Parameter(
                layer, _MATRIX_NAMES[key], num_experts, rows, cols, bool(module.is_transposed)
            )
            check_experts(num_experts, rows, cols, num_layers=len(modules))
            shapes.add((key, num_experts, rows, cols))
    if len(shapes) != 2:
        raise UnsupportedModelError(f"The experts' matrices have {len(shapes)} shapes; all layers must share two.")
    return parameters


def _find_pieces(
    converters: Mapping[str, WeightConverter],
    collected: Mapping[str, Sources],
    parameters: Mapping[str, _Parameter],
    entries: Mapping[str, TensorEntry],
) -> tuple[ExpertPiece, ...]:
    """Interpret what transformers' loader would do with the tensors of each experts parameter."""
    pieces: list[ExpertPiece] = []
    for target, sources in collected.items():
        if target not in parameters:
            continue
        converter = converters.get(next(iter(sources)))
        expected = converter.source_patterns if converter else [UNCONVERTED]
        if not sources.keys() <= set(expected):
            raise CheckpointError(f"Both fused and single tensors claim to be {target}; remove one kind.")
        ordered = [sources[pattern] for pattern in expected if pattern in sources]
        pieces += _interpret(parameters[target], converter.operations if converter else [], ordered, entries)
    return tuple(pieces)


def _interpret(
    parameter: _Parameter,
    operations: Sequence[object],
    sources: Sequence[Sequence[str]],
    entries: Mapping[str, TensorEntry],
) -> list[ExpertPiece]:
    """The pieces of one parameter from the tensors of each source pattern, in the order of their rows."""
    is_transposed, is_stacked = parameter.is_transposed, False
    for operation in operations:
        if isinstance(operation, StackedExperts):
            is_stacked = True
        elif isinstance(operation, Transpose) and {operation.dim0, operation.dim1} == {1, 2}:
            is_kept = operation.check_dims and entries[sources[0][0]].shape == parameter.shape
            is_transposed ^= not is_kept
        elif not _only_places(operation, parameter.is_transposed):
            raise UnsupportedModelError(f"No test proves the conversion {operation!r} of expert weights yet.")
    pieces: list[ExpertPiece] = []
    row_start = 0
    for names in sources:
        shapes = [entries[name].shape for name in names]
        if is_stacked:
            shapes = [_unstacked(shape, parameter.num_experts) for shape in shapes]
        added = _pieces_of(parameter, dict(zip(names, shapes, strict=True)), row_start, is_transposed)
        row_start += added[0].num_rows
        pieces += added
    return pieces


def _only_places(operation: object, is_transposed: bool) -> bool:
    """Whether an operation stacks experts or joins rows, which moves no value inside an expert's matrix."""
    if isinstance(operation, Concatenate):
        return bool(operation.dim == (2 if is_transposed else 1))
    return isinstance(operation, MergeModulelist) and operation.dim == 0


def _unstacked(shape: Sequence[int], num_experts: int) -> tuple[int, ...]:
    """[E * rows, cols] as [E, rows, cols]; another shape stays, and fits no expert."""
    if len(shape) != 2 or shape[0] % num_experts:
        return tuple(shape)
    return (num_experts, shape[0] // num_experts, shape[1])


def _pieces_of(
    parameter: _Parameter, shapes: Mapping[str, Sequence[int]], row_start: int, is_transposed: bool
) -> list[ExpertPiece]:
    """The pieces of one source pattern, `shapes` by tensor: one tensor an expert, or one for all experts."""
    names = list(shapes)
    shape = shapes[names[0]]
    is_fused = len(shape) == 3
    rows, cols = shape[-2:][::-1] if is_transposed else shape[-2:]
    for name in names:
        if shapes[name] != shape or len(shape) not in (2, 3) or cols != parameter.cols:
            raise CheckpointError(f"Tensor {name!r} has shape {list(shapes[name])}, which fits no expert.")
    if is_fused and len(names) > 1:
        raise CheckpointError(f"Both {names[0]!r} and {names[1]!r} claim to hold all experts; remove one.")
    sources = [(names[0], index) for index in range(shape[0])] if is_fused else [(name, None) for name in names]
    return [
        ExpertPiece(
            tensor=name,
            layer=parameter.layer,
            expert=expert,
            matrix=parameter.matrix,
            row_start=row_start,
            num_rows=rows,
            index=index,
            is_transposed=is_transposed,
        )
        for expert, (name, index) in enumerate(sources)
    ]


def _top_k(model: PreTrainedModel, num_experts: int) -> int:
    """How many experts the configuration gives a token."""
    config = model.config.get_text_config()
    name = FAMILIES[config.model_type].top_k
    top_k = attrgetter(name)(config)
    if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"config.json routes every token to {top_k} of {num_experts} experts; {name} must be 1 to {num_experts}."
        )
    return top_k


def _check_coverage(pieces: Sequence[ExpertPiece], parameters: Mapping[str, _Parameter]) -> None:
    """Every row of every expert exactly once, and no expert that the model does not have."""
    spans: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        spans[piece.layer, piece.expert, piece.matrix].append((piece.row_start, piece.num_rows))
    for name, parameter in parameters.items():
        for expert in range(parameter.num_experts):
            end = 0
            for row_start, num_rows in sorted(spans.pop((parameter.layer, expert, parameter.matrix), [])):
                end = end + num_rows if row_start == end else -1
            if end != parameter.rows:
                raise CheckpointError(
                    f"The checkpoint does not hold expert {expert} of {name} exactly once; download it again."
                )
    if spans:
        layer, expert, matrix = min(spans)
        raise CheckpointError(
            f"The checkpoint holds {matrix} of an expert {expert} in MoE layer {layer}, more than "
            "config.json counts; check that they belong together."
        )
