"""The phases of a benchmark, each a function of the session that adds its part to the result."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch

from accelerate_offload import measure_accelerate
from activity import profile
from cold_start import measure_cold_start
from jobs import Job, open_pool, prompts_of, run_all
from moespeq.errors import MoespeqError
from moespeq.hardware.link import measure_copies
from moespeq.store import Store
from rows import AS_IS, IDENTICAL_ROWS, ROWS
from runs import hash_tokens, one_line
from session import Session
from wide_store import build_store
from widen import WideModel, write_checkpoint

_TTFT_PROMPTS = 3
MODEL_CONTEXT_TOK = 16384  # longer than the seeds were trained for, so that long prompts can be timed
_ACTIVITY_TOK = 32
_HOST_SHARE = 0.8  # of the free host memory that accelerate may fill


def build(session: Session) -> None:
    """Widen into a store for each layout that a row asks for, unless it is there."""
    options = session.options
    for layout in options.layouts:
        path = options.store(layout)
        if not path.exists():
            begin_s = time.perf_counter()
            spill = options.spill and options.spill / layout.value
            build_store(_model(session), path, layout=layout, spill=spill, device=options.device)
            session.result.setdefault("build_s", {})[layout.value] = round(time.perf_counter() - begin_s, 1)
    with Store.open(options.store()) as store:
        manifest = store.manifest
        weights = sum(rows * cols for rows, cols in manifest.shapes)
        num_records = manifest.num_layers * manifest.num_experts
        record_bytes = sum(row.record.num_bytes for row in store.records.rows) / num_records
        session.result["store"] = {
            "experts_per_layer": manifest.num_experts,
            "moe_layers": manifest.num_layers,
            "record_bytes": record_bytes,
            "plain_record_bytes": 2 * weights,
            "base_bytes": manifest.base_file_bytes / num_records,
            "bits_per_weight": 8 * record_bytes / weights,
        }


def link(session: Session) -> None:
    """Measure the link: what every floor divides by is the bandwidth at the block nearest to a record."""
    device = torch.device(session.options.device)
    copies = {
        name: {str(block): rate for block, rate in measure_copies(device, is_pinned=is_pinned).items()}
        for name, is_pinned in (("pinned", True), ("pageable", False))
        if device.type == "cuda" or not is_pinned
    }
    used = copies.get("pinned") or copies["pageable"]
    record_bytes = session.result["store"]["record_bytes"]
    nearest = min(used, key=lambda block: abs(int(block) - record_bytes))
    session.result["link"] = {"bytes_per_s": used[nearest], "by_block": copies}


def rows(session: Session) -> None:
    """Every row on every link, repetition by repetition, the n-th on prompt n."""
    options, prompts = session.options, prompts_of(session)
    jobs = [
        Job(ROWS[name], link_name, number, number, prompts.question(number), options.new_tok)
        for number in range(options.repetitions)
        for link_name in options.links
        for name in options.rows
    ]
    run_all(session, "runs", jobs)


def ttft(session: Session) -> None:
    """Time to first token by prompt length, a few prompts each, on the unpaced link; the context holds the longest."""
    options, prompts = session.options, prompts_of(session)
    jobs = [
        Job(ROWS[name], AS_IS, number, number, prompts.long(num_tok, 16 * number), 1)
        for name in options.rows
        for num_tok in options.ttft_tok
        for number in range(_TTFT_PROMPTS)
    ]
    longest_tok = max(options.ttft_tok) + 1
    is_long = options.context_tok is not None and longest_tok > options.context_tok
    run_all(session, "ttft", jobs, **({"ctx_size": longest_tok} if is_long else {}))


def identity(session: Session) -> None:
    """Speculative and plain decoding in the same row bucket must give the same tokens."""
    num_prompts, num_tok = session.options.identity
    prompts = prompts_of(session)
    jobs = [
        Job(ROWS[name], AS_IS, number, 0, prompts.question(number), num_tok)
        for number in range(num_prompts)
        for name in IDENTICAL_ROWS
    ]
    budget_bytes = session.options.identity_budget_bytes
    run_all(session, "identity", jobs, **({} if budget_bytes is None else {"device_memory": budget_bytes}))
    for run in session.result["identity"]:
        run["rounds"] = {}  # thousands of them, and only the tokens matter here


def activity(session: Session) -> None:
    """Device busy share and link utilisation of a request under the profiler. Needs a GPU."""
    if session.options.device != "cuda":
        return
    tokens = prompts_of(session).question(0)
    found: dict[str, Any] = {}
    with open_pool(session) as pool:
        for name in session.options.rows:
            try:
                engine = pool.get(ROWS[name], None)
                found[name] = profile(
                    lambda engine=engine: engine.generate(
                        tokens, max_new_tokens=_ACTIVITY_TOK, temperature=0.0, ignore_eos=True
                    )
                ).to_json()
            except (MoespeqError, RuntimeError) as error:
                found[name] = {"error": one_line(error)}
    session.result["activity"] = found


def cold(session: Session) -> None:
    """Start the nested engine from the disk, once. The store must lie on one, not in memory."""
    options = session.options
    loading = {"device": options.device, "device_memory": options.budget_bytes, **ROWS["nested"].options}
    if options.context_tok is not None:
        loading["ctx_size"] = options.context_tok
    try:
        session.result["cold"] = measure_cold_start(options.store(), prompts_of(session).question(0), **loading)
    except (MoespeqError, RuntimeError) as error:
        session.result["cold"] = {"error": one_line(error)}


def accelerate(session: Session) -> None:
    """transformers with accelerate's offload, once; writes the widened checkpoint it loads."""
    options = session.options
    checkpoint = options.work / f"{options.shape.name}-checkpoint"
    if not checkpoint.exists():
        begin_s = time.perf_counter()
        write_checkpoint(_model(session), checkpoint)
        session.result["checkpoint_seconds"] = round(time.perf_counter() - begin_s, 1)
    try:
        measured = measure_accelerate(
            checkpoint,
            prompts_of(session).question(0),
            budget_bytes=options.budget_bytes,
            host_bytes=int(_HOST_SHARE * psutil.virtual_memory().available),
            new_tok=options.accelerate_tok,
            device=options.device,
        )
        session.result["accelerate"] = {**measured, "tokens_sha256": hash_tokens(measured.pop("tokens"))}
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        session.result["accelerate"] = {"error": one_line(error)}


PHASES = {phase.__name__: phase for phase in (build, link, cold, rows, ttft, identity, activity, accelerate)}


def _model(session: Session) -> WideModel:
    options = session.options
    return WideModel(
        options.seed,
        options.shape.factors,
        device=options.device,
        num_layers=options.shape.num_layers,
        context_tok=MODEL_CONTEXT_TOK,
    )
