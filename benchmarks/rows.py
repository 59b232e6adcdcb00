"""The engines that are compared, each by the options that make it.

load: options that decide memory and graphs; knobs: options that a loaded engine may change between generations. The
paper's ablation comes first: offloading, a draft, prefetch of plain records; then what the nested format adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moespeq.nested import Layout

BASELINE = "on_demand"
IDENTICAL_ROWS = ("nested", "nested_k0")
AS_IS = "as-is"  # the link that is not paced
DEPTH = 32
ROUND_ROWS = DEPTH + 1  # texts are compared between rows of this bucket
_PLAIN = {"records": "plain", "rows": ROUND_ROWS}
_NESTED = {"rows": ROUND_ROWS}


@dataclass(frozen=True, slots=True)
class Row:
    """One engine. slots_as: give it the slots of that row instead of its budget, to compare bytes alone; layout: the
    store it opens, None for the session's.
    """

    name: str
    label: str
    load: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    slots_as: str | None = None
    layout: Layout | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {**self.load, **self.knobs}

    @property
    def needs_gpu(self) -> bool:
        """Plain records are decoded for a GPU only."""
        return self.load.get("records") == "plain"


ROWS = {
    row.name: row
    for row in (
        Row(BASELINE, "on demand, plain records, LRU", {"mode": "on_demand", "records": "plain"}),
        Row(
            "on_demand_next_use",
            "on demand, plain records, our eviction",
            {"mode": "on_demand", "records": "plain", "eviction": "next_use"},
        ),
        Row("draft_only", f"draft of {DEPTH}, plain records, no prefetch", _PLAIN, {"k": DEPTH, "prefetch": False}),
        Row("plain", f"draft of {DEPTH}, plain records, prefetch", _PLAIN, {"k": DEPTH}),
        Row("nested", f"draft of {DEPTH}, nested records, prefetch", _NESTED, {"k": DEPTH}),
        Row(
            "nested_fixed",
            f"draft of {DEPTH}, nested records of fixed width, prefetch",
            _NESTED,
            {"k": DEPTH},
            layout=Layout.FIXED,
        ),
        Row(
            "nested_code_width",
            f"draft of {DEPTH}, nested records of code width, prefetch",
            _NESTED,
            {"k": DEPTH},
            layout=Layout.CODE_WIDTH,
        ),
        Row("nested_auto", "draft by the governor, nested records, prefetch", _NESTED, {"k": "auto"}),
        Row("nested_k0", f"no draft, {ROUND_ROWS} rows, nested records", _NESTED, {"k": 0}),
        Row("nested_one_row", "no draft, one row, nested records", {"rows": 1, "k": 0, "records": "store"}),
        Row(
            "plain_equal_slots",
            f"draft of {DEPTH}, plain records, prefetch, as many slots as nested",
            _PLAIN,
            {"k": DEPTH},
            slots_as="nested",
        ),
    )
}
