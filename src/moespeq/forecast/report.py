"""One model on one machine, planned: where every byte would go, why, how fast it would be, and what would help.

A GPU that is not here can be planned for: with device "cuda" and a device_memory it counts as free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from moespeq.config import LoadOptions
from moespeq.decode.planning import ModelSizes, StoreSizes, machine_for, plan_for
from moespeq.errors import BudgetError, UsageError
from moespeq.forecast.advice import AGREEMENT, Help, what_helps
from moespeq.forecast.fitting import DraftNeed, WayToFit, draft_needs, ways_to_fit
from moespeq.forecast.sizes import CheckpointSizes
from moespeq.nested import Layout
from moespeq.plan import Machine, MemoryNeeds, MemoryPlan, resolve_options
from moespeq.plan.sharing import Sharing, sharing_of
from moespeq.plan.speed import Speed, expected_speed
from moespeq.prepare import is_store, name_of, resolve_description
from moespeq.store import Store

__all__ = ["PlanReport", "plan_model"]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """model: its name; asked: as it was given; source: what the sizes are from. Either `plan` is there and what follows
    from it, or `refusal` and `ways`; with `draft_needs` where no way gives an engine that drafts.

    disk_bytes: of the store. is_here: False where the GPU is one that is only planned for. hit_share: of the experts a
    pass asks for, if all were used alike. speed: None where nothing is known to reckon with.
    """

    model: str
    asked: str
    source: str
    options: LoadOptions
    disk_bytes: int
    is_here: bool = True
    plan: MemoryPlan | None = None
    needs: MemoryNeeds | None = None
    hit_share: float = 0.0
    speed: Speed | None = None
    sharing: Sharing | None = None
    helps: tuple[Help, ...] = ()
    refusal: str | None = None
    ways: tuple[WayToFit, ...] = ()
    draft_needs: tuple[DraftNeed, ...] = ()


def plan_model(source: str | Path, **options: Any) -> PlanReport:
    """Plan for `source`, a store, a checkpoint, its config and index alone, or a hub id; options as for `load`.

    Raises what is wrong with options or model; that it does not fit is a report.
    """
    parsed = LoadOptions.from_mapping(options)
    machine = _machine(parsed)
    if parsed.device == "cuda" and machine.gpu_free_bytes is None:
        raise UsageError(f"{machine.gpu.rstrip('.')}; or give --device-memory to plan for a GPU that is not here.")
    if is_store(Path(source)):
        with Store.open(Path(source)) as store:
            return _report(StoreSizes(store), store.manifest.name, str(source), "the store", parsed, machine)
    folder, name = resolve_description(source), name_of(source)
    has_gpu = resolve_options(parsed, machine).device == "cuda"
    sizes = CheckpointSizes(
        folder, name, layout=Layout.CODE_WIDTH if has_gpu else Layout.FIXED, convert_to=parsed.convert_to
    )
    words = "config and index; records as large as trained models' are"
    return _report(sizes, name, str(source), words, parsed, machine)


def _report(
    sizes: ModelSizes, model: str, asked: str, source: str, options: LoadOptions, machine: Machine
) -> PlanReport:
    sizes = _Remembered(sizes)
    stored = sizes.needs("store")
    disk_bytes = stored.dense_bytes + stored.base_bytes + stored.records_bytes
    report = PlanReport(model, asked, source, options, disk_bytes, machine.is_here)
    try:
        chosen, plan = plan_for(sizes, options, machine)
    except BudgetError as error:
        ways = tuple(ways_to_fit(sizes, options, machine))
        needed = () if any(way.has_draft for way in ways) else tuple(draft_needs(sizes, options, machine))
        return replace(report, refusal=str(error), ways=ways, draft_needs=needed)
    needs = sizes.needs(chosen.records)
    speed = expected_speed(plan, needs, chosen, machine, agreement=AGREEMENT[sizes.base_bits])
    helps = () if speed is None else tuple(what_helps(sizes, options, machine, plan, speed))
    return replace(
        report,
        options=chosen,
        plan=plan,
        needs=needs,
        hit_share=plan.num_slots / needs.num_records,
        speed=speed,
        sharing=sharing_of(plan, needs),
        helps=helps,
    )


class _Remembered:
    """The same sizes, added up once for each form of records: advice asks again and again."""

    def __init__(self, sizes: ModelSizes) -> None:
        self.name, self.is_plain, self.base_bits = sizes.name, sizes.is_plain, sizes.base_bits
        self.target = sizes.target
        self.base_bytes, self.num_records = sizes.base_bytes, sizes.num_records
        self.needs = cache(sizes.needs)


def _machine(options: LoadOptions) -> Machine:
    """This one, or where a GPU is asked for that is not here, one with the memory that was given."""
    machine = machine_for(options)
    if options.device != "cuda" or machine.gpu_free_bytes is not None or options.device_memory is None:
        return machine
    host_bytes = max(machine.host_free_bytes, 2 * (options.host_memory or 0))
    return replace(
        machine,
        gpu_free_bytes=options.device_memory,
        host_free_bytes=host_bytes,
        gpu="the GPU planned for, which is not here",
        is_here=False,
    )
