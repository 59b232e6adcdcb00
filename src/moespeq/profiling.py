"""What `moespeq profile` measures: the machine's copies and disk, and with a model its draft, verify and decoding.

A model is measured through the engine people use, at full draft length and with as many rows as it then has; the time a
pass waits for the link is taken off, so that what remains is arithmetic. Medians over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moespeq.api import load
from moespeq.cache_folder import cache_folder
from moespeq.config import LoadOptions
from moespeq.decode.engine import Engine
from moespeq.decode.planning import plan_of
from moespeq.errors import UsageError
from moespeq.hardware.disk import measure_reads, scratch_file
from moespeq.hardware.gpu import require_gpu
from moespeq.hardware.link import measure_copies
from moespeq.nested import BaseFormat, Layout, decode_record, split_base
from moespeq.plan.profile import DiskRate, MachineProfile, ModelTimes
from moespeq.prepare import ProgressSink, prepare_cached
from moespeq.prepare.experts import view_of
from moespeq.store import Store
from moespeq.types import ExpertKey, StepReport

__all__ = ["choose_device", "device_name", "profile_machine"]

Say = Callable[[str], None]
_DISK_THREADS = (1, 4)
_DISK_BYTES = 1 << 30
_PROMPT = range(3, 35)  # any tokens; times do not depend on what they mean
_ROUNDS = 8
_DECODES = 20


def profile_machine(
    model: str | Path | None,
    *,
    device: str,
    rows: Sequence[int],
    say: Say,
    progress: ProgressSink | None = None,
    disk_bytes: int = _DISK_BYTES,
    **options: Any,
) -> MachineProfile:
    """Measure `device` ("cpu" or "cuda") and, where one is given, a model with each of the row buckets `rows`.

    options: those of `load`. say: takes a line of progress. Raises what loading raises, before anything is measured.
    """
    if 1 in rows:
        raise UsageError("One row never drafts, so it says nothing of a draft; give rows of 17, 33 or 65.")
    where = torch.device(device)
    asked = {bucket: {**options, "device": device, "rows": bucket, "k": bucket - 1} for bucket in rows}
    for each in asked.values():
        LoadOptions.from_mapping(each)
    store = None if model is None else _fitting_store(model, device, asked, progress)
    begin = _Steps(say, _num_steps(where, store, len(asked)))
    pinned = {}
    if where.type == "cuda":
        begin("copies from pinned memory")
        pinned = _pinned_copies(where, say)
    begin("copies from pageable memory")
    pageable = measure_copies(where, is_pinned=False)
    return MachineProfile(
        device=device_name(device),
        pinned_copy=pinned,
        pageable_copy=pageable,
        disk=_disk_rates(store, disk_bytes, begin),
        models=() if store is None else (_model_times(store, where, asked, begin),),
    )


def _fitting_store(
    model: str | Path, device: str, asked: Mapping[int, Mapping[str, Any]], progress: ProgressSink | None
) -> Path:
    """The store of `model`, once all that will be loaded is known to fit."""
    store = prepare_cached(model, device=device, progress=progress)
    with Store.open(store) as opened:
        for bucket, options in asked.items():
            _, plan = plan_of(opened, LoadOptions.from_mapping(options))
            if plan.context_tok < len(_PROMPT) + 2 * bucket:
                raise UsageError(_no_full_round(plan.context_tok, bucket - 1))
    return store


def _no_full_round(context_tok: int, k: int) -> str:
    return f"{context_tok} tokens of context leave no round of {k} drafts; take fewer rows or a larger context."


def choose_device(name: str) -> str:
    """ "cpu" or "cuda" for a name that may be "auto". Raises UsageError where a GPU is asked for and not usable."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"Unknown device '{name}'; use auto, cpu or cuda.")
    if name == "cpu":
        return name
    try:
        require_gpu()
    except UsageError:
        if name == "cuda":
            raise
        return "cpu"
    return "cuda"


def device_name(device: str) -> str:
    """What a profile of "cpu" or "cuda" calls it."""
    return torch.cuda.get_device_name(torch.device(device)) if device == "cuda" else "cpu"


class _Steps:
    """Says which step begins, and the how-manyth of how many it is."""

    def __init__(self, say: Say, total: int) -> None:
        self._say, self._total, self._begun = say, total, 0

    def __call__(self, what: str) -> None:
        self._begun += 1
        self._say(f"{what} ({self._begun} of {self._total})")


def _num_steps(device: torch.device, store: Path | None, num_buckets: int) -> int:
    """Copies of one or two kinds, disk reads, and a scratch file for them or a model's buckets and decoding."""
    return (2 if device.type == "cuda" else 1) + len(_DISK_THREADS) + (1 if store is None else num_buckets + 1)


def _pinned_copies(device: torch.device, say: Say) -> dict[int, float]:
    try:
        return measure_copies(device, is_pinned=True)
    except RuntimeError as error:
        say(f"pinning is refused ({str(error).splitlines()[0]}); copies go through pageable memory")
        return {}


def _disk_rates(store: Path | None, num_bytes: int, begin: Say) -> tuple[DiskRate, ...]:
    """Of the store's own records where there is a store, else of a scratch file in the cache folder."""
    if store is not None:
        return _rates_of(store / "experts.bin", num_bytes, begin)
    begin("the disk: writing a scratch file")
    with scratch_file(cache_folder(), num_bytes) as path:
        return _rates_of(path, num_bytes, begin)


def _rates_of(path: Path, num_bytes: int, begin: Say) -> tuple[DiskRate, ...]:
    rates = []
    for num_threads in _DISK_THREADS:
        begin(f"disk reads, {num_threads} at a time")
        rate = measure_reads(path, num_threads=num_threads, max_bytes=num_bytes)
        rates.append(DiskRate(num_threads, rate.bytes_per_s, rate.is_direct))
    return tuple(rates)


def _model_times(store: Path, device: torch.device, asked: Mapping[int, Mapping[str, Any]], begin: Say) -> ModelTimes:
    verify_s: dict[int, float] = {}
    draft_s: list[float] = []
    for bucket, options in asked.items():
        begin(f"draft and verify with {bucket} rows")
        with load(store, **options) as engine:
            reports = _full_rounds(engine, bucket - 1)
        verify_s[bucket] = statistics.median(report.verify_s - report.stall_s for report in reports)
        draft_s += [report.draft_s / (report.k + 1) for report in reports]
    begin("decoding of records")
    with Store.open(store) as opened:
        return ModelTimes(
            model=opened.manifest.name,
            draft_s_per_tok=statistics.median(draft_s),
            verify_s=verify_s,
            decode_bytes_per_s=_decode_bytes_per_s(opened, device),
        )


def _full_rounds(engine: Engine, k: int) -> list[StepReport]:
    """Rounds of full draft length, the first one left out: it compiles and captures."""
    limit_tok = engine.plan.context_tok - len(_PROMPT)
    stream = engine.stream(list(_PROMPT), max_new_tokens=limit_tok, temperature=0.0, ignore_eos=True)
    for num_pieces, _ in enumerate(stream):
        if num_pieces > _ROUNDS:
            stream.cancel()
    reports = [report for report in stream.result.stats.reports[1:] if report.k == k]
    if not reports:
        raise UsageError(_no_full_round(engine.plan.context_tok, k))
    return reports


def _decode_bytes_per_s(store: Store, device: torch.device) -> float:
    """bf16 bytes a second out of the first expert's records, as the device decodes them."""
    key, manifest = ExpertKey(0, 0), store.manifest
    base = torch.empty(store.base_bytes(key), dtype=torch.uint8)
    record = torch.empty(store.record_bytes(key), dtype=torch.uint8)
    store.read_base_into(key, view_of(base), verify=True)
    store.read_record_into(key, view_of(record), verify=True)
    decode = _decoder(record.to(device), base.to(device), manifest.shapes, manifest.base_format, store.layout(key))
    decode()
    _wait(device)
    begin_s = time.perf_counter()
    for _ in range(_DECODES):
        decode()
    _wait(device)
    decoded_bytes = 2 * sum(rows * cols for rows, cols in manifest.shapes)
    return _DECODES * decoded_bytes / (time.perf_counter() - begin_s)


def _decoder(
    record: torch.Tensor, base: torch.Tensor, shapes: Sequence[tuple[int, int]], fmt: BaseFormat, layout: Layout
) -> Callable[[], object]:
    if record.is_cuda and layout.is_bf16:
        from moespeq.kernels.decode import decode_expert
        from moespeq.kernels.geometry import ExpertGeometry

        up, down = shapes
        geometry = ExpertGeometry((up, down), fmt)
        return lambda: decode_expert(record, base, geometry=geometry, layout=layout)
    bases = split_base(base, shapes, fmt)
    return lambda: decode_record(record, bases, shapes, fmt, layout)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
