"""What would make an engine fit that does not: other options, each planned, the mildest of its kind that is enough; and
what a draft would take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from moespeq.config import LoadOptions
from moespeq.decode.planning import ModelSizes, plan_for, record_choices
from moespeq.errors import BudgetError, UsageError
from moespeq.plan import DEFAULT_CONTEXT_TOK, SHORT_CONTEXT_TOK, Machine, least_memory_bytes, resolve_options

__all__ = ["DraftNeed", "WayToFit", "draft_needs", "ways_to_fit"]

_SHORTER_CONTEXTS_TOK = (2048, 1024, 512, SHORT_CONTEXT_TOK)
_FEWEST_ROWS, _FEWEST_PREFILL_ROWS = 17, 512
_GRAIN_BYTES = 1 << 20  # sizes are proposed in whole MiB

_Options = tuple[str, LoadOptions]
"""As they are written, in place of those asked for; and all of them together."""


@dataclass(frozen=True, slots=True)
class WayToFit:
    """Options in place of those asked for: the least device memory of the engine they give, whether it fits here, and
    whether it then drafts.
    """

    options: str
    least_bytes: int
    is_enough: bool
    has_draft: bool


@dataclass(frozen=True, slots=True)
class DraftNeed:
    """The least device memory with which an engine drafts, its whole base resident."""

    context_tok: int
    least_bytes: int


def ways_to_fit(sizes: ModelSizes, options: LoadOptions, machine: Machine) -> list[WayToFit]:
    """Of each kind of change the mildest that is enough, and the mildest that leaves room for a draft; where none is
    enough, of each kind the one that takes least.
    """
    here = resolve_options(options, machine)
    here_bytes = _least_bytes(sizes, here)
    ways: list[WayToFit] = []
    for kind in _kinds(sizes, here, here_bytes, machine):
        tried: list[WayToFit] = []
        for words, changed in kind:
            with suppress(UsageError):
                tried.append(_try(sizes, words, changed, machine))
                if tried[-1].has_draft:
                    break
        ways += [way for way in _mildest(tried) if not any(_are_alike(way, other) for other in ways)]
    enough = [way for way in ways if way.is_enough]
    return enough or [way for way in ways if way.least_bytes < here_bytes]


def draft_needs(sizes: ModelSizes, options: LoadOptions, machine: Machine) -> list[DraftNeed]:
    """With the context asked for, and with the shortest that is proposed; none where nothing can be or shall be
    drafted.
    """
    here = resolve_options(options, machine)
    if here.mode == "on_demand" or here.k == 0 or sizes.is_plain:
        return []
    needs, asked_tok = sizes.needs("store"), _context_tok(sizes, here)
    contexts_tok = [asked_tok, *_shorter_contexts(sizes, here)[-1:]]
    drafting = [replace(here, records="store", base_memory=None, ctx_size=tok) for tok in contexts_tok]
    return [DraftNeed(one.ctx_size or asked_tok, least_memory_bytes(needs, one)) for one in drafting]


def _mildest(tried: list[WayToFit]) -> list[WayToFit]:
    """Of ways from mild to strong the first that is enough and the last, where that drafts; else the last."""
    enough = next((way for way in tried if way.is_enough), None)
    if enough is None:
        return tried[-1:]
    return [enough] if tried[-1] is enough or not tried[-1].has_draft else [enough, tried[-1]]


def _are_alike(one: WayToFit, other: WayToFit) -> bool:
    """Whether two give the same engine."""
    return replace(one, options="") == replace(other, options="")


def _try(sizes: ModelSizes, words: str, options: LoadOptions, machine: Machine) -> WayToFit:
    try:
        chosen, plan = plan_for(sizes, options, machine)
    except BudgetError:
        return WayToFit(words, _least_bytes(sizes, options), is_enough=False, has_draft=False)
    least_bytes = least_memory_bytes(sizes.needs(chosen.records), chosen)
    return WayToFit(words, least_bytes, is_enough=True, has_draft=plan.num_bases > 0 and options.k != 0)


def _kinds(sizes: ModelSizes, here: LoadOptions, here_bytes: int, machine: Machine) -> Iterator[list[_Options]]:
    """Each from mild to strong."""
    shorter = _shorter_contexts(sizes, here)
    yield list(_other_budgets(here, machine))
    if here.prefill_rows > _FEWEST_PREFILL_ROWS:
        fewer_at_once = replace(here, prefill_rows=_FEWEST_PREFILL_ROWS)
        yield [(f"--prefill-rows {_FEWEST_PREFILL_ROWS}", fewer_at_once)]
    yield [_with_context(here, "", tok) for tok in shorter]
    if here.mode == "on_demand":
        return
    if here.row_bucket > _FEWEST_ROWS:
        fewer = replace(here, rows=_FEWEST_ROWS, k=here.k if here.k == "auto" else min(here.k, _FEWEST_ROWS - 1))
        words = f"--rows {_FEWEST_ROWS}" if fewer.k == here.k else f"--rows {_FEWEST_ROWS} --k {fewer.k}"
        yield [(words, fewer), *(_with_context(fewer, words, tok) for tok in shorter)]
    if here.base_memory:
        yield list(_smaller_base(here, here_bytes))
    if not sizes.is_plain:
        words, undrafted = "--base-memory 0 --k 0", replace(here, records="whole", base_memory=None, k=0)
        yield [(words, undrafted), *(_with_context(undrafted, words, tok) for tok in shorter)]
    if here.base_memory is not None:
        return
    words = "--mode on_demand" if here.k == "auto" else "--mode on_demand --k auto"
    on_demand = replace(here, mode="on_demand", k="auto", k_min=0, records="auto", base_memory=None, rows=None)
    yield [(words, on_demand), *(_with_context(on_demand, words, tok) for tok in shorter)]


def _shorter_contexts(sizes: ModelSizes, options: LoadOptions) -> list[int]:
    return [tok for tok in _SHORTER_CONTEXTS_TOK if tok < _context_tok(sizes, options)]


def _context_tok(sizes: ModelSizes, options: LoadOptions) -> int:
    return options.ctx_size or min(sizes.needs("store").shape.max_context_tok, DEFAULT_CONTEXT_TOK)


def _with_context(options: LoadOptions, words: str, tok: int) -> _Options:
    return f"{words} --ctx-size {tok}".strip(), replace(options, ctx_size=tok)


def _other_budgets(options: LoadOptions, machine: Machine) -> Iterator[_Options]:
    """What is free in place of more than that."""
    if options.host_memory:
        yield "--host-memory 0", replace(options, host_memory=0)
    free_bytes = machine.gpu_free_bytes if options.device == "cuda" else machine.host_free_bytes
    if options.device_memory is not None and free_bytes is not None and options.device_memory > free_bytes:
        room_bytes = free_bytes // _GRAIN_BYTES * _GRAIN_BYTES
        yield f"--device-memory {room_bytes // _GRAIN_BYTES}MiB", replace(options, device_memory=room_bytes)


def _smaller_base(options: LoadOptions, here_bytes: int) -> Iterator[_Options]:
    """As much less as is missing."""
    if options.base_memory is None or options.device_memory is None:
        return
    room_bytes = (options.base_memory - (here_bytes - options.device_memory)) // _GRAIN_BYTES * _GRAIN_BYTES
    if room_bytes > 0:
        yield f"--base-memory {room_bytes // _GRAIN_BYTES}MiB", replace(options, base_memory=room_bytes)


def _least_bytes(sizes: ModelSizes, options: LoadOptions) -> int:
    return min(least_memory_bytes(sizes.needs(choice.records), choice) for choice in record_choices(sizes, options))
