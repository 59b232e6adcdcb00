"""Options a person can set, with their defaults, checked once. Frozen: nothing writes into a configuration later.

"auto" is resolved by `plan`, which keeps the reason for each figure; here a value is only checked for being legal.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from moespeq.errors import UsageError

__all__ = [
    "ROW_BUCKETS",
    "LoadOptions",
    "RecordForm",
    "format_at_least",
    "format_bytes",
    "format_count",
    "nearest_name",
    "parse_bytes",
]

ROW_BUCKETS = (1, 17, 33, 65)
RecordForm = Literal["auto", "store", "mixed", "whole", "plain"]
"""What crosses the link; see LoadOptions."""
_DEFAULT_ROWS = {"cpu": 17, "cuda": 33}
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_ADDRESSABLE_BYTES = 2**63
_MOST_LINK_THREADS = 256  # more than any disk has a use for
_SIZES = ("device_memory", "host_memory", "base_memory", "prefix_cache", "link_bytes_per_s")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """`12GiB`, `512MB`, `4096` -> bytes. A unit without "i" is decimal."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise UsageError(f"A size cannot be negative, got {text}.")
        return _addressable(text)
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise UsageError(f"'{text}' is not a size; write it like 12GiB, 512MiB or 4096.")
    return _addressable(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _addressable(num_bytes: float) -> int:
    if num_bytes >= _ADDRESSABLE_BYTES:
        raise UsageError("A size must be below 8 EiB, what 63 bits can address; write it like 12GiB.")
    return int(num_bytes)


def format_bytes(num_bytes: float) -> str:
    """A size for people, in the largest binary unit that keeps it at or above 1: `11.60 GiB`."""
    value, units = float(num_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} {units[-1]}"


def format_at_least(num_bytes: int) -> str:
    """The same, rounded up: a size that is given back as it is printed is enough."""
    unit_bytes = next((size for size in (1 << 40, 1 << 30, 1 << 20, 1 << 10) if num_bytes >= size), 100)
    return format_bytes(-(-100 * num_bytes // unit_bytes) * unit_bytes / 100)


def format_count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`: for nouns whose plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def nearest_name(wrong: str, known: list[str]) -> str:
    """' Did you mean X?' for a mistyped name, or the empty string when nothing is near."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How an engine is loaded. Sizes are bytes; None means "auto".

    device: where it computes; "auto" is a GPU where there is one.
    device_memory: all that the engine holds there: dense weights, base, KV cache, workspace and slots.
    host_memory: records in front of the disk on a CPU, in pinned memory in front of the link on a GPU.
    ctx_size: the context in tokens; KV cache and workspace follow from it.
    prefill_rows: prompt tokens that a prefill pass takes at once; fewer need less workspace.
    prefetch: whether predictions move records ahead of time.
    rows: the row bucket R of every verify pass; k is at most R - 1 and results are identical between runs of equal R.
    1 is for an engine that never drafts.
    k: a fixed draft length, 0 for plain decoding, or "auto" for the governor.
    k_min, itl_budget_ms: for k="auto", the shortest draft that may be chosen, and the longest that a round, the wait
    between two bursts of tokens, may take; the shortest draft is allowed whatever it takes.
    mode: "speculative", or "on_demand": one row, no draft, LRU slots, the baseline of other engines.
    lookahead_tok: draft steps of a round whose routes are fetched for, the first ones; None is all of them.
    eviction: who leaves a full set of slots; "auto" is next_use, and lru on demand. Ablations: lru, lfu, and chunk,
    which orders fetches too, as the paper's released code does (residency.baselines).
    records: what crosses the link. "store": what is stored, completed by the resident base; "whole": base and residual
    together, with no base resident and so no draft; "mixed": either, with the base of a part of the experts resident;
    "plain": bf16, decoded into host memory (an ablation; CUDA only). "auto" is store where the base fits, else mixed
    where a k above 0 is asked for, else whole.
    base_memory: bytes of the device for the base, from none to all of it; the rest of the experts' base travels.
    prefix_cache: bytes of host memory for keys and values of earlier prompts, see `reuse` of `Engine.stream`.
    link_bytes_per_s: paces reads to a given bandwidth; None is as fast as the disk goes.
    convert_to: "bf16" rounds fp32 or fp16 experts of a checkpoint when it is prepared, and warns; fp32 needs it.
    threads: CPU threads that multiply, for the whole process; link_threads are those that read.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    device_memory: int | None = None
    host_memory: int | None = None
    base_memory: int | None = None
    k: int | Literal["auto"] = "auto"
    k_min: int = 0
    itl_budget_ms: float | None = None
    rows: int | None = None
    ctx_size: int | None = None
    mode: Literal["speculative", "on_demand"] = "speculative"
    prefetch: bool = True
    lookahead_tok: int | None = None
    eviction: Literal["auto", "next_use", "lru", "lfu", "chunk"] = "auto"
    records: RecordForm = "auto"
    link_bytes_per_s: float | None = None
    link_threads: int = 2
    threads: int | None = None
    prefill_rows: int = 8192
    prefix_cache: int = 0
    convert_to: Literal["bf16"] | None = None

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device '{self.device}' is unknown; use 'auto', 'cpu' or 'cuda'.")
        if self.mode not in ("speculative", "on_demand"):
            raise UsageError(f"mode '{self.mode}' is unknown; use 'speculative' or 'on_demand'.")
        if self.eviction not in ("auto", "next_use", "lru", "lfu", "chunk"):
            known = "'auto', 'next_use', 'lru', 'lfu' or 'chunk'"
            raise UsageError(f"eviction '{self.eviction}' is unknown; use {known}.")
        if self.records not in ("auto", "store", "mixed", "whole", "plain"):
            raise UsageError(f"records '{self.records}' is unknown; use 'auto', 'store', 'mixed', 'whole' or 'plain'.")
        if self.rows is not None and not (isinstance(self.rows, int) and self.rows in ROW_BUCKETS):
            raise UsageError(f"rows must be one of {', '.join(map(str, ROW_BUCKETS))}, got {self.rows!r}.")
        if self.convert_to not in (None, "bf16"):
            raise UsageError(f"convert_to must be 'bf16' or left out, got {self.convert_to!r}.")
        if not isinstance(self.prefetch, bool):
            raise UsageError(f"prefetch must be True or False, got {self.prefetch!r}.")
        self._check_base()
        self._check_k()
        for name in ("ctx_size", "threads", "lookahead_tok"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        _check_count("prefill_rows", self.prefill_rows)
        _check_count("link_threads", self.link_threads, most=_MOST_LINK_THREADS)
        if self.link_bytes_per_s is not None and not 0 < self.link_bytes_per_s < math.inf:
            raise UsageError(f"The link bandwidth must be above 0 bytes/s, got {self.link_bytes_per_s}.")

    @property
    def has_draft(self) -> bool:
        """Whether a base is resident to draft with."""
        return self.mode == "speculative" and self.records != "whole"

    def _check_base(self) -> None:
        if self.records == "mixed" and self.mode == "on_demand":
            raise UsageError("on_demand keeps no base in memory, and records='mixed' keep a part of it; leave one out.")
        if self.base_memory is None:
            return
        if self.mode == "on_demand":
            raise UsageError("on_demand keeps no base in memory; leave base_memory out.")
        if self.records not in ("auto", "mixed"):
            raise UsageError(f"base_memory decides which records travel whole; leave records='{self.records}' out.")

    def _check_k(self) -> None:
        self._check_governed()
        if self.k == "auto":
            return
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 0:
            raise UsageError(f"k must be 'auto' or a whole number from 0 to {self._known_rows - 1}, got {self.k!r}.")
        if self.k and self.mode == "on_demand":
            raise UsageError(f"on_demand decodes without a draft, got k={self.k}; leave k out.")
        if self.k and self.records == "whole":
            raise UsageError(f"Whole records leave no base resident to draft with, got k={self.k}; leave k out.")
        self._check_fits_rows("k", self.k)

    def _check_governed(self) -> None:
        """What bounds the governor's choice."""
        if isinstance(self.k_min, bool) or not isinstance(self.k_min, int) or self.k_min < 0:
            raise UsageError(f"k_min must be a whole number from 0 to {self._known_rows - 1}, got {self.k_min!r}.")
        self._check_fits_rows("k_min", self.k_min)
        if self.itl_budget_ms is not None and not 0 < self.itl_budget_ms < math.inf:
            raise UsageError(f"itl_budget_ms must be above 0 ms, got {self.itl_budget_ms!r}.")

    def _check_fits_rows(self, name: str, k: int) -> None:
        rows = self._known_rows
        if k > rows - 1:
            larger = next((bucket for bucket in ROW_BUCKETS if bucket > k), None)
            if larger is None:
                most = ROW_BUCKETS[-1]
                raise UsageError(
                    f"{name}={k} needs {k + 1} rows and the most are {most}; {name} is at most {most - 1}."
                )
            advice = f"load with rows={larger} (--rows {larger})"
            raise UsageError(f"{name}={k} needs {k + 1} rows, but rows is {rows}; {advice}.")

    @property
    def _known_rows(self) -> int:
        """The row bucket, or the largest default where the device is open."""
        is_open = self.device == "auto" and self.rows is None and self.mode != "on_demand"
        return max(_DEFAULT_ROWS.values()) if is_open else self.row_bucket

    @property
    def row_bucket(self) -> int:
        """R: the rows of every verify pass; by default the device's, which must have been chosen by now."""
        if self.mode == "on_demand":
            return 1
        return self.rows if self.rows is not None else _DEFAULT_ROWS[self.device]

    def replaced(self, changes: Mapping[str, Any]) -> LoadOptions:
        """These options with some of them changed; sizes may be text."""
        return LoadOptions.from_mapping(
            {field.name: getattr(self, field.name) for field in fields(self)} | dict(changes)
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> LoadOptions:
        """Options from keywords; sizes may be text, None is the default. Raises UsageError for a name not known."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UsageError(f"Unknown option '{name}'.{nearest_name(name, known)}")
        given = {name: value for name, value in values.items() if value is not None}
        sizes = {name: parse_bytes(given[name]) for name in _SIZES if name in given}
        return cls(**{**given, **sizes})


def _check_count(name: str, value: int, *, most: int | None = None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < 1 or (most is not None and value > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise UsageError(f"{name} must be a whole number {allowed}, got {value!r}.")
