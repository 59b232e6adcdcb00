"""Which tensors of a checkpoint fill each weight of a model, by the names transformers' loader gives them.

Owns the refusal of a weight outside the routed experts that has no tensor or one of another shape: a store with
such a hole would only fail when it is run. What becomes of the experts' tensors is read elsewhere.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moespeq.errors import CheckpointError
from moespeq.model.shims import converters_of
from moespeq.store import TensorEntry

__all__ = ["UNCONVERTED", "Sources", "check_dense_weights", "find_sources"]

UNCONVERTED = ""
Sources = dict[str, list[str]]
"""Tensor names by the converter's pattern that takes them, UNCONVERTED for those loaded as they are."""


def find_sources(
    model: PreTrainedModel, entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, WeightConverter], dict[str, Sources]]:
    """Walk the tensors as transformers' loader does: its converters by pattern, and the sources of each weight."""
    mapping = [*get_model_conversion_mapping(model), *converters_of(model)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, Sources] = defaultdict(lambda: defaultdict(list))
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        targets = _targets(target, by_pattern[pattern]) if pattern in by_pattern else [target]
        for each in targets:
            if each in state:
                sources[each][pattern or UNCONVERTED].append(name)
    return by_pattern, sources


def _targets(first: str, converter: WeightConverter) -> list[str]:
    """All weights that a converter makes, where its first is known."""
    patterns = converter.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]


def check_dense_weights(
    model: PreTrainedModel,
    experts: Collection[str],
    sources: Mapping[str, Sources],
    entries: Mapping[str, TensorEntry],
) -> None:
    """Raise CheckpointError for the first weight, but those of `experts`, that no tensor fills in its shape.

    The shape that a converter makes is not known here: such a weight must have sources of as many numbers.
    """
    optional = re.compile("|".join(f"({name})" for name in model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
    tied = _tied_names(model)
    for name, weight in model.state_dict().items():
        if name in experts:
            continue
        is_filled = any(_covers(sources.get(target, {}), weight.numel(), entries) for target in tied.get(name, {name}))
        if not is_filled and not optional.search(name):
            raise CheckpointError(
                f"The checkpoint lacks {name!r}, which its config.json asks for; download it again or check that "
                "they belong together."
            )
        for source in sources.get(name, {}).get(UNCONVERTED, ()):
            shape = entries[source].shape
            if shape != tuple(weight.shape):
                raise CheckpointError(
                    f"Tensor {source!r} has shape {list(shape)} and config.json asks for {list(weight.shape)}; "
                    "check that they belong together."
                )


def _covers(sources: Sources, num_weights: int, entries: Mapping[str, TensorEntry]) -> bool:
    """Whether there are sources; those of a converter, which may join several, must hold as many weights together."""
    if not sources or UNCONVERTED in sources:
        return bool(sources)
    return sum(math.prod(entries[name].shape) for names in sources.values() for name in names) >= num_weights


def _tied_names(model: PreTrainedModel) -> dict[str, set[str]]:
    """For every weight that shares its values: all names, any of which fills it."""
    groups: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        group = groups.setdefault(source, {source})
        group.add(target)
        groups[target] = group
    return groups
