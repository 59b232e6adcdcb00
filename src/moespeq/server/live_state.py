"""What the live page is told, as JSON: how the server is, the passes since it last asked, memory, and the experts.

Runs beside the engine, never on its thread; reads the history, and of the engine what never changes. A reader says what
it has already: a page that looks on twice a second gets the new passes only, and the experts where they changed.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from moespeq import __version__
from moespeq.decode.engine import Engine
from moespeq.decode.link_meter import Span
from moespeq.errors import UsageError
from moespeq.server.history import ExpertsSeen, PassKept, PassSpans
from moespeq.server.service import Service
from moespeq.server.worker import WorkerState
from moespeq.types import Cause

__all__ = ["PASS_COLUMNS", "LiveState"]

PASS_COLUMNS = (
    *("number", "begin_s", "end_s", "is_prefill", "k", "accepted", "committed", "hits", "late", "misses"),
    *("draft_s", "verify_s", "stall_s", "link_busy_s", "wasted_bytes"),
    *(f"{cause.name.lower()}_bytes" for cause in Cause),
)
_DIGITS = 5  # of seconds
_MOST_USE = 127  # a byte an expert: recent use, and the highest bit where it has a slot
_SHORTEST_GAP = 1 / 400  # of a pass: shorter ones nobody can see


class LiveState:
    """Answers for one service. start: changes when the server is another one, whose passes count from 1 again."""

    def __init__(self, service: Service) -> None:
        self._service, self._start = service, uuid.uuid4().hex

    def to_json(self, *, since: int, experts_since: int) -> dict[str, Any]:
        """since: the last pass that the reader has, 0 for none; experts_since: that of its experts."""
        worker, glimpse = self._service.worker, self._service.history.since(since)
        state: dict[str, Any] = {
            "start": self._start,
            "version": __version__,
            "model": self._service.model_name,
            "status": self._status(),
            "running": worker.num_running,
            "waiting": worker.num_waiting,
            "totals": glimpse.totals,
            "columns": PASS_COLUMNS,
            "passes": [_row(kept) for kept in glimpse.passes],
            "spans": [_spans(spans) for spans in glimpse.spans],
        }
        if worker.state is WorkerState.LOADING:
            progress = self._service.progress
            state["loading"] = {
                "what": progress.what,
                "done_bytes": progress.done_bytes,
                "total_bytes": progress.total_bytes,
            }
        if worker.state is WorkerState.READY:
            state["engine"] = _engine(worker.engine)
        if glimpse.experts is not None and glimpse.experts.number > experts_since:
            state["experts"] = _experts(glimpse.experts)
        return state

    def _status(self) -> str:
        worker = self._service.worker
        if worker.state is WorkerState.READY and not worker.is_healthy:
            return "unhealthy"
        return worker.state.value


def _row(kept: PassKept) -> list[float]:
    report = kept.report
    seconds = (report.draft_s, report.verify_s, report.stall_s, report.link_busy_s)
    return [
        *(kept.number, round(kept.begin_s, _DIGITS), round(kept.end_s, _DIGITS), int(kept.is_prefill)),
        *(report.k, report.accepted, report.committed, report.hits, report.late, report.misses),
        *(round(part_s, _DIGITS) for part_s in seconds),
        kept.wasted_bytes,
        *(report.bytes_by_cause.get(cause, 0) for cause in Cause),
    ]


def _spans(spans: PassSpans) -> dict[str, Any]:
    """Times from the pass's begin on, in its parts of one."""
    return {"number": spans.number, "copies": _shares(spans, spans.copies), "waits": _shares(spans, spans.waits)}


def _shares(within: PassSpans, spans: Sequence[Span]) -> list[float]:
    """Begin, end, begin, end ... as shares of the pass; spans that touch to the eye are one."""
    if not spans:
        return []
    whole_s = max(within.end_s - within.begin_s, 1e-9)
    shares = np.clip((np.asarray(spans) - within.begin_s) / whole_s, 0.0, 1.0)  # [n, 2]
    is_apart = shares[1:, 0] - shares[:-1, 1] >= _SHORTEST_GAP
    begins, ends = shares[np.append(True, is_apart), 0], shares[np.append(is_apart, True), 1]
    joined: list[float] = np.stack([begins, ends], axis=1).round(4).ravel().tolist()
    return joined


def _engine(engine: Engine) -> dict[str, Any]:
    """What was planned, and how far host memory is filled by now."""
    plan, fill = engine.plan, engine.host_fill
    return {
        "device": plan.device,
        "context_tok": plan.context_tok,
        "rows": engine.options.row_bucket,
        "k": engine.options.k,
        "has_chat": _has_chat(engine),
        "num_slots": plan.num_slots,
        "slot_bytes": plan.slot_bytes,
        "budget_bytes": plan.budget_bytes,
        "device_bytes": {
            "dense": plan.dense_bytes,
            "base": plan.base_bytes,
            "kv": plan.kv_bytes,
            "workspace": plan.workspace_bytes,
            "slots": plan.slots_bytes,
        },
        "host_bytes": plan.host_bytes,
        "host_filled_bytes": fill.filled_bytes if fill.total_bytes else None,
        "reasons": dict(plan.reasons),
    }


def _has_chat(engine: Engine) -> bool:
    try:
        return engine.tokenizer.has_chat_template
    except UsageError:
        return False


def _experts(seen: ExpertsSeen) -> dict[str, Any]:
    """levels: base64 of a byte an expert, layer by layer; 127 is the one used most, by the square root of its use."""
    use = np.asarray(seen.use, dtype=np.float64)
    most = use.max()
    levels = np.ceil(_MOST_USE * np.sqrt(use / most)) if most > 0 and math.isfinite(most) else np.zeros_like(use)
    coded = levels.astype(np.uint8)
    coded[np.asarray(seen.resident, dtype=np.intp)] |= 0x80
    return {
        "number": seen.number,
        "num_layers": len(use) // seen.num_experts,
        "num_experts": seen.num_experts,
        "num_resident": len(seen.resident),
        "levels": base64.b64encode(coded.tobytes()).decode("ascii"),
    }
