"""What an engine of a model will take and how it will run, before anything is loaded: sizes of a store, or of one that
would be made, the machine they meet, and what "auto" records become. `plan` decides about bytes; this knows stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from moespeq.config import LoadOptions, RecordForm, format_at_least, format_bytes
from moespeq.errors import BudgetError, UsageError
from moespeq.hardware.cores import physical_cores
from moespeq.hardware.gpu import require_gpu
from moespeq.hardware.memory import available_host_bytes
from moespeq.kernels.geometry import READ_AHEAD_BYTES
from moespeq.model.dense_weights import loaded_bytes
from moespeq.model.loading import describe, load_config
from moespeq.nested import Layout
from moespeq.plan import Machine, MemoryNeeds, MemoryPlan, least_memory_bytes, plan_memory, resolve_options
from moespeq.plan.profile import MachineProfile, default_profile_path
from moespeq.store import DiskSource, Store
from moespeq.transfer import host_arena_bytes, plain_record_bytes, slot_stride_bytes

__all__ = [
    "ModelSizes",
    "StoreSizes",
    "machine_for",
    "needs_of",
    "plan_for",
    "plan_of",
    "record_choices",
    "tell_target",
]

_ON_DEMAND_RECORDS = {
    "store": "store: its records are plain and need no base",
    "whole": "whole: on demand nothing is drafted and no base is resident, so it travels with its residual",
}


class ModelSizes(Protocol):
    """A store as planning sees it. base_bits: of a code; base_bytes: of all experts; is_plain: records need no base;
    target: what the experts are where they are not bf16 and what follows, for people; else "".
    """

    @property
    def name(self) -> str: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def target(self) -> str: ...
    @property
    def base_bits(self) -> int: ...
    @property
    def base_bytes(self) -> int: ...
    @property
    def num_records(self) -> int: ...
    def needs(self, records: RecordForm) -> MemoryNeeds:
        """What the model needs with its records moved like this."""
        ...


class StoreSizes:
    """Those of a store that is there."""

    def __init__(self, store: Store) -> None:
        self._store, self._manifest = store, store.manifest

    @property
    def name(self) -> str:
        return str(self._store.path)

    @property
    def is_plain(self) -> bool:
        return not any(layout.needs_base for layout in self._manifest.layouts)

    @property
    def target(self) -> str:
        return tell_target(self._manifest.layouts, self._manifest.base_format.bits)

    @property
    def base_bits(self) -> int:
        return self._manifest.base_format.bits

    @property
    def base_bytes(self) -> int:
        return self._manifest.base_file_bytes

    @property
    def num_records(self) -> int:
        return self._manifest.num_layers * self._manifest.num_experts

    def needs(self, records: RecordForm) -> MemoryNeeds:
        return needs_of(self._store, records)


def needs_of(store: Store, records: RecordForm = "store") -> MemoryNeeds:
    """What the model of a store needs, from its manifest and configuration alone, with its records moved like this."""
    manifest = store.manifest
    config = load_config(store.model_folder)
    shape = describe(
        config,
        num_moe_layers=manifest.num_layers,
        num_experts=manifest.num_experts,
        top_k=manifest.top_k,
        matrices=list(manifest.matrices),
    )
    source = DiskSource(store, with_base=records in ("mixed", "whole"))
    plain_bytes = plain_record_bytes(manifest.shapes) if records == "plain" else None
    keys = list(store.keys())
    num_bytes = {key: plain_bytes or source.num_bytes(key) for key in keys}
    return MemoryNeeds(
        shape=shape,
        dense_bytes=sum(loaded_bytes(file.entries) for file in store.dense_files()),
        base_bytes=manifest.base_file_bytes,
        slot_bytes=slot_stride_bytes(max(num_bytes.values()) + READ_AHEAD_BYTES),
        num_records=len(num_bytes),
        records_bytes=host_arena_bytes(num_bytes),
        model=manifest.name,
        is_complete=not any(layout.needs_base for layout in manifest.layouts),
    )


def plan_of(store: Store, options: LoadOptions) -> tuple[LoadOptions, MemoryPlan]:
    """The options with device and records chosen, and where an engine's memory would go on this machine.

    Raises BudgetError or UsageError.
    """
    return plan_for(StoreSizes(store), options, machine_for(options))


def plan_for(sizes: ModelSizes, options: LoadOptions, machine: Machine) -> tuple[LoadOptions, MemoryPlan]:
    """The same of any sizes on any machine. Raises BudgetError or UsageError."""
    options, plan = _plan_of_records(sizes, options, machine)
    return options, replace(plan, reasons={**plan.reasons, "target": sizes.target}) if sizes.target else plan


def tell_target(layouts: Iterable[Layout], base_bits: int) -> str:
    """What the experts are where they are not bf16, what their records weigh, and what a base can be beside them."""
    names = sorted({layout.value for layout in layouts if not layout.is_bf16})
    if not names:
        return ""
    words = f"{' and '.join(names)}: records are the checkpoint's own numbers, whole; the base of {base_bits} bits is"
    words += " the draft's alone"
    if Layout.MXFP4.value in names:
        words += "; one of 4 bits could not be smaller than the target, whose weights have 4.25"
    return f"{words}; on a GPU torch decodes every record in every pass"


def _plan_of_records(sizes: ModelSizes, options: LoadOptions, machine: Machine) -> tuple[LoadOptions, MemoryPlan]:
    """With the first form of records that fits."""
    *first_choice, last = record_choices(sizes, resolve_options(options, machine))
    for choice in first_choice:
        with suppress(BudgetError):
            return choice, plan_memory(sizes.needs(choice.records), choice, machine)
    plan = plan_memory(sizes.needs(last.records), last, machine)
    for choice in first_choice:
        least = format_at_least(least_memory_bytes(sizes.needs(choice.records), choice))
        reason = f"{last.records}: with all of the base an engine takes at least {least}"
        plan = replace(plan, reasons={**plan.reasons, "records": reason})
    if options.records == "auto" and options.mode == "on_demand":
        plan = replace(plan, reasons={**plan.reasons, "records": _ON_DEMAND_RECORDS[last.records]})
    return last, plan


def record_choices(sizes: ModelSizes, options: LoadOptions) -> list[LoadOptions]:
    """What "auto" records may become, in order of preference. Raises UsageError where a choice cannot run."""
    if options.mode == "on_demand" and options.records == "store" and not sizes.is_plain:
        raise UsageError(
            f"{sizes.name} holds nested records, and on_demand keeps no base in memory to complete them; use "
            f"records='whole', or a store made by `moespeq prepare --format plain`."
        )
    if options.records == "plain" and options.device == "cpu":
        raise UsageError(
            "Plain records are decoded for a GPU; a CPU takes a store made by `moespeq prepare --format plain`."
        )
    if options.records == "plain" and sizes.target:
        raise UsageError(f"The experts of {sizes.name} are not bf16, which plain records are; leave records out.")
    if options.base_memory is not None:
        return [_with_base_memory(sizes, options, options.base_memory)]
    if options.records != "auto":
        return [options]
    if options.mode == "on_demand":
        return [replace(options, records="store" if sizes.is_plain else "whole")]
    is_draft_asked = options.k not in ("auto", 0)
    otherwise = replace(options, records="mixed") if is_draft_asked else replace(options, records="whole", k=0)
    return [replace(options, records="store"), otherwise]


def _with_base_memory(sizes: ModelSizes, options: LoadOptions, base_memory: int) -> LoadOptions:
    """`base_memory` as the records it makes travel. Raises UsageError when it leaves nothing to draft with."""
    if base_memory >= sizes.base_bytes:
        return replace(options, records="store", base_memory=None)
    row_bytes = -(-sizes.base_bytes // sizes.num_records)
    if base_memory >= row_bytes:
        return replace(options, records="mixed")
    if options.k not in ("auto", 0):
        raise UsageError(
            f"base_memory of {format_bytes(base_memory)} holds not one expert's base of {format_at_least(row_bytes)}, "
            f"so k={options.k} has nothing to draft with; give more, or leave k out."
        )
    return replace(options, records="whole", base_memory=None, k=0)


def machine_for(options: LoadOptions) -> Machine:
    """What is free here, and was measured; a GPU is looked at only if it may be used: that creates its context."""
    path = default_profile_path()
    machine = Machine(
        available_host_bytes(),
        physical_cores(),
        gpu="as asked for",
        profile=MachineProfile.load(path),
        profile_path=path,
    )
    if options.device == "cpu":
        return machine
    try:
        gpu = require_gpu()
    except UsageError as error:
        return replace(machine, gpu=str(error))
    return replace(machine, gpu_free_bytes=gpu.free_bytes, gpu=gpu.name)
