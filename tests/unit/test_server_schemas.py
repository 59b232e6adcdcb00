"""Schemas whose grammar would let through what is no JSON are refused in a sentence; the others pass unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from moespeq.errors import UsageError
from moespeq.server.schemas import enforceable

TREE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"anyOf": [{"$ref": "#"}]},
        {"allOf": [{"type": "string"}, {"oneOf": [{"$ref": "#/allOf/1"}]}]},
        {"$defs": {"a/b~": {"$ref": "#/$defs/a~1b~0"}}},
    ],
)
def test_a_reference_that_leads_back_to_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="leads back to itself"):
        enforceable(schema)


@pytest.mark.parametrize("schema", [{}, TREE, {"$ref": "#/none"}, {"$ref": "other.json"}, {"items": {"$ref": "#"}}])
def test_a_schema_that_only_repeats_in_its_parts_passes_unchanged(schema: dict[str, Any]) -> None:
    assert enforceable(schema) == schema


def test_true_admits_anything_and_false_is_refused() -> None:
    assert enforceable(True) == {}
    with pytest.raises(UsageError, match="no answer can match"):
        enforceable(False)


def test_options_of_the_compiler_are_not_a_clients_to_set() -> None:
    with pytest.raises(UsageError, match="x-guidance"):
        enforceable({"x-guidance": {"key_separator": "Z"}, "type": "object"})
    assert enforceable({"properties": {"x-guidance": {}}}) == {"properties": {"x-guidance": {}}}


def test_a_schema_nested_deep_needs_no_stack() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"allOf": [deep]}
    assert enforceable(deep) is deep
