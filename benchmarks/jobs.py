"""Generations to run, and how they share engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moespeq.config import parse_bytes
from moespeq.decode.engine import Engine
from moespeq.errors import MoespeqError
from moespeq.model.tokenizer import Tokenizer
from moespeq.store import Store
from pool import EnginePool, Opened
from prompts import Prompts
from rows import AS_IS, Row
from runs import Run, measure, one_line
from session import Session

_WARM_TOK = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One generation to run."""

    row: Row
    link: str
    prompt: int
    repetition: int
    tokens: Sequence[int]
    new_tok: int

    @property
    def link_bytes_per_s(self) -> float | None:
        return None if self.link == AS_IS else parse_bytes(self.link)


def run_all(session: Session, name: str, jobs: Sequence[Job], **changed: Any) -> None:
    """Run jobs in their order where all their engines fit beside each other, else engine by engine; save each run.

    Runs of an earlier call stay, except those that are run again. changed: load options that this phase's engines have
    in place of the session's; they are noted in the result, and such engines are not.
    """
    session.result.setdefault("changed_options", {}).pop(name, None)
    if changed:
        session.result["changed_options"][name] = changed
    replaced = {(job.row.name, job.link, job.prompt, len(job.tokens)) for job in jobs}
    runs = [run for run in session.result.get(name, []) if _identity(run) not in replaced]
    num_kept = len(runs)
    session.result[name] = runs
    with open_pool(session, longest_tok=max(len(job.tokens) for job in jobs), **changed) as pool:
        keys = [pool.key(job.row, job.link_bytes_per_s) for job in jobs]
        is_interleaved = len(set(keys)) <= session.options.max_open
        if is_interleaved:
            session.note_interleaved(name, list(dict.fromkeys(job.row.name for job in jobs)))
        order = list(range(len(jobs)))
        if not is_interleaved:
            order.sort(key=lambda place: keys.index(keys[place]))
        for place in order:
            if session.is_out_of_time:
                session.result.setdefault("stopped_early", {})[name] = f"{len(runs) - num_kept} of {len(jobs)} runs"
                return
            run = _run(pool, jobs[place])
            print(f"  {run.row} {run.link} #{run.prompt}: {_in_short(run)}", flush=True)
            runs.append(asdict(run))
            session.save()


def _identity(run: Mapping[str, Any]) -> tuple[str, str, int, int]:
    return run["row"], run["link"], run["prompt"], run["prompt_tok"]


def _run(pool: EnginePool, job: Job) -> Run:
    try:
        engine = pool.get(job.row, job.link_bytes_per_s)
    except (MoespeqError, RuntimeError) as error:
        return Run(job.row.name, job.link, job.prompt, job.repetition, len(job.tokens), error=one_line(error))
    return measure(
        engine,
        job.tokens,
        row=job.row.name,
        link=job.link,
        prompt=job.prompt,
        repetition=job.repetition,
        new_tok=job.new_tok,
    )


def _in_short(run: Run) -> str:
    if run.error is not None:
        return run.error
    return f"TTFT {run.ttft_s:.3f} s, {max(1, run.new_tok - 1) / max(run.decode_s, 1e-9):.1f} tok/s"


def open_pool(session: Session, *, longest_tok: int = 0, **changed: Any) -> EnginePool:
    """An empty pool for the session's store; engines are warmed up, for prompts of up to `longest_tok`, and noted."""
    options = session.options
    common: dict[str, Any] = {"device": options.device, "device_memory": options.budget_bytes}
    if options.context_tok is not None:
        common["ctx_size"] = options.context_tok
    common |= changed
    prompts = prompts_of(session)
    warm = [prompts.question(0)]
    if options.device == "cuda" and longest_tok:  # a CPU compiles nothing, and would take minutes for a long prompt
        warm.insert(0, prompts.long(longest_tok))

    def warm_up(engine: Engine) -> None:
        for tokens in warm:
            engine.generate(tokens, max_new_tokens=_WARM_TOK, temperature=0.0, ignore_eos=True)

    def on_open(name: str, opened: Opened) -> None:
        plan = opened.engine.plan
        reason = plan.reasons.get("host_memory", "as asked for")
        print(f"  opened {name} in {opened.load_s:.1f} s: {plan.num_slots} slots, host memory {reason}", flush=True)
        if not changed:
            session.result.setdefault("engines", {})[name] = opened.to_json()

    return EnginePool(
        options.store,
        common,
        max_open=options.max_open,
        context_bytes=session.context_bytes,
        warm_up=warm_up,
        on_open=on_open,
    )


def prompts_of(session: Session) -> Prompts:
    """The prompts of the session's data, in the tokenizer of its store."""
    with Store.open(session.options.store()) as store:
        tokenizer = Tokenizer.load(store.model_folder)
    assert tokenizer is not None, "seeds carry a tokenizer"
    return Prompts(session.options.data, tokenizer)
