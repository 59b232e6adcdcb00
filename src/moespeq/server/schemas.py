"""JSON schemas of clients, before they become grammars: what a grammar would get wrong without a word is refused here.

The rest, such as a keyword that is not known, the grammar's own compiler refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from moespeq.errors import UsageError

__all__ = ["enforceable"]

_OF_THE_COMPILER = "x-guidance"  # options that change how JSON is written, into what is none
_IN_PLACE = ("allOf", "anyOf", "oneOf")


def enforceable(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """`schema` as an object. Raises UsageError where it admits nothing, or says how a grammar is to be compiled."""
    if schema is False:
        raise UsageError("The JSON schema is false, which no answer can match; change it.")
    if schema is True:
        return {}
    if _OF_THE_COMPILER in schema:
        raise UsageError(f"The JSON schema has '{_OF_THE_COMPILER}', which is not a client's to set; leave it out.")
    references = {one for node in _nodes(schema) for one in _references(node)}
    try:
        TopologicalSorter({one: set(_references(_at(schema, one))) for one in references}).prepare()
    except CycleError as error:
        raise UsageError(
            f"The '$ref' {error.args[1][0]!r:.80} of the JSON schema leads back to itself, so no JSON can match it; "
            "change it."
        ) from None
    return schema


def _nodes(value: Any) -> Iterator[Any]:
    """All that `value` holds, itself included."""
    left = [value]
    while left:
        yield (node := left.pop())
        if isinstance(node, dict | list):
            left += node.values() if isinstance(node, dict) else node


def _references(schema: Any) -> Iterator[str]:
    """Those that say what `schema` itself is, and not a part of it."""
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, dict):
            continue
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for word in _IN_PLACE:
            left += node[word] if isinstance(node.get(word), list) else []


def _at(schema: Any, reference: str) -> Any:
    """What a reference within `schema` points to; None for any other."""
    if not reference.startswith("#"):
        return None
    node = schema
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else _item(node, name)
    return node


def _item(node: Any, name: str) -> Any:
    is_index = isinstance(node, list) and name.isdecimal() and int(name) < len(node)
    return node[int(name)] if is_index else None
