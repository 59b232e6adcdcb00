"""The families of the exactness matrix as a table: what of each was checked, and how that ended.

    make exact > exact.txt; python benchmarks/exact_table.py < exact.txt

Reads pytest's own lines (-rA), so it says nothing that no test said. A check that did not run is a dash.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["CHECKS", "read_outcomes", "table_of"]

CHECKS: Mapping[str, str] = {
    "test_target_logits_equal_those_of_transformers": "logits",
    "test_keys_values_and_states_take_what_the_plan_says": "sizes",
    "test_rejected_tokens_leave_no_trace": "rejected rows",
    "test_speculative_text_is_plain_text_with_a_draft_that_is_often_wrong": "poor draft",
    "test_every_acceptance_length_keeps_the_text": "every length",
    "test_logits_are_those_of_transformers_whatever_the_chunks": "logits at 32k",
    "test_rounds_across_the_border_give_the_text_of_plain_decoding": "text at 32k",
}
"""Test functions with a case for each family, and the column of each."""
_LINE = re.compile(r"^(PASSED|FAILED|ERROR) \S+/(\w+)\.py::(\w+)\[(?:\d+-)?(\w+)\]", re.MULTILINE)
_FAMILIES = "test_families"  # the module whose cases are families; others have cases of other kinds too


def read_outcomes(text: str) -> dict[str, dict[str, list[bool]]]:
    """Whether each case passed: family -> test function -> its cases. Lines of other tests are left out."""
    lines = _LINE.findall(text)
    families = {case for _, module, _, case in lines if module == _FAMILIES}
    outcomes: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for outcome, _, function, case in lines:
        if function in CHECKS and case in families:
            outcomes[case][function].append(outcome == "PASSED")
    return outcomes


def table_of(outcomes: Mapping[str, Mapping[str, list[bool]]]) -> Iterator[str]:
    """Lines of a Markdown table, families by name."""
    yield from (_row(["family", *CHECKS.values()]), _row(["---"] * (len(CHECKS) + 1)))
    for family in sorted(outcomes):
        yield _row([family, *(_cell(outcomes[family].get(function, [])) for function in CHECKS)])


def _cell(cases: list[bool]) -> str:
    if not cases:
        return "-"
    return "yes" if all(cases) else f"**{cases.count(False)} of {len(cases)} failed**"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table_of(read_outcomes(sys.stdin.read()))))
