"""The table of the exactness matrix says what pytest said, and of what did not run nothing."""

from __future__ import annotations

from pathlib import Path

from exact_table import CHECKS, read_outcomes, table_of

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = "tests/golden/test_families.py::"
SAID = f"""
_____ test_every_acceptance_length_keeps_the_text[4-zaya] _____
PASSED {GOLDEN}test_target_logits_equal_those_of_transformers[zaya]
PASSED {GOLDEN}test_every_acceptance_length_keeps_the_text[1-zaya]
FAILED {GOLDEN}test_every_acceptance_length_keeps_the_text[4-zaya] - assert [] == [1]
ERROR {GOLDEN}test_keys_values_and_states_take_what_the_plan_says[mixtral] - OSError
PASSED tests/golden/test_long_contexts.py::test_logits_are_those_of_transformers_whatever_the_chunks[zaya]
PASSED tests/golden/test_long_contexts.py::test_logits_are_those_of_transformers_whatever_the_chunks[default]
PASSED tests/golden/test_exact.py::test_text_does_not_depend_on_k[greedy]
1 failed, 3 passed, 1 error in 9.9s
"""


def test_every_column_is_a_test_that_there_is() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py"))
    assert [function for function in CHECKS if f"def {function}(" not in tests] == []


def test_a_check_is_passed_where_all_of_its_cases_are() -> None:
    lines = list(table_of(read_outcomes(SAID)))
    assert [line.count("|") for line in lines] == [len(CHECKS) + 2] * 4
    assert lines[0].startswith("| family | logits | sizes | rejected rows |")
    assert lines[2] == "| mixtral | - | **1 of 1 failed** | - | - | - | - | - |"
    assert lines[3] == "| zaya | yes | - | - | - | **1 of 2 failed** | yes | - |"
