"""What is wrong with a request's body or path, as one sentence in the words of the API.

pydantic reports every way in which a body is wrong, each alternative of a field by itself; one sentence names the field
that the client wrote, as it wrote it. The engine's options have other names in the API than in Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["in_api_words", "invalid", "no_json", "no_such_path", "wrong_method"]

_SHOWN_CHARS = 60
_NAMING = ("missing", "extra_forbidden")  # errors whose last name is a field's, and no alternative's
_WANTED = "Input should be "
_OF_A_KIND = ("union_tag_invalid", "union_tag_not_found")  # errors about a field that says what an object is
_OBJECTS = ("model_type", "dict_type")  # which pydantic calls by names of ours
_OF_ITS_LENGTH = {
    "too_short": "is empty; it needs at least {min_length} item",
    "too_long": "may hold at most {max_length} items; give fewer",
    "string_too_short": "is empty; it needs at least {min_length} character",
    "string_too_long": "may have at most {max_length} characters; shorten it",
}


def invalid(errors: Sequence[Any], given: Any) -> tuple[str, str | None]:
    """The sentence for pydantic's `errors` about what was `given`, and the field, None where it is the body itself.

    The error furthest inside is told: of alternatives, that is one of those which the client meant.
    """
    paths = [_path(error, given) for error in errors]
    deepest = max(paths, key=len)
    if any(error["type"] == "string_unicode" for error in errors):
        return "The name of a field holds half a character, which no text can; correct it.", ".".join(deepest) or None
    if not deepest:
        return "The body is no JSON object; send one.", None
    meant = [error for error, path in zip(errors, paths, strict=True) if path == deepest]
    if meant[0]["type"] in _OF_A_KIND:
        deepest = [*deepest, meant[0]["ctx"]["discriminator"].strip("'")]
    field = ".".join(deepest)
    return _about(field, meant), field


def _about(field: str, errors: Sequence[Any]) -> str:
    """One sentence of all that may be wrong with one field."""
    first = errors[0]
    if first["type"] == "union_tag_invalid":
        kinds, kind = first["ctx"]["expected_tags"].replace(", ", " or "), _shown(first["ctx"]["tag"])
        return f"'{field}' should be {kinds}, got {kind}; correct it."
    if first["type"] in ("missing", "union_tag_not_found"):
        return f"The field '{field}' is missing; add it."
    if first["type"] == "extra_forbidden":
        return f"The field '{field}' is not known here; leave it out."
    if first["type"] == "value_error":
        return f"'{field}' {first['ctx']['error']}."
    of_right_kind = next((error for error in errors if error["type"] in _OF_ITS_LENGTH), None)
    if of_right_kind is not None:
        return f"'{field}' {_OF_ITS_LENGTH[of_right_kind['type']].format(**of_right_kind['ctx'])}."
    wanted = " or ".join(dict.fromkeys(map(_wanted, errors)))
    return f"'{field}' should be {wanted}, got {_shown(first['input'])}; correct it."


def _wanted(error: Any) -> str:
    if error["type"] in _OBJECTS:
        return "an object"
    return str(error["msg"]).removeprefix(_WANTED)


def _path(error: Any, given: Any) -> list[str]:
    """Where the error is in what was given, without the names that pydantic gives to alternatives."""
    parts, path, here = error["loc"], [], given
    for number, part in enumerate(parts):
        is_inside = part in here if isinstance(here, Mapping) else isinstance(here, list) and isinstance(part, int)
        if is_inside:
            here = here[part]
        elif error["type"] not in _NAMING or number + 1 < len(parts):
            continue
        path.append(str(part))
    return path


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def no_json(error: ValueError) -> str:
    """The sentence for what Python's reader of JSON says of a body."""
    if isinstance(error, json.JSONDecodeError):
        return f"The body is not JSON ({error.msg.removesuffix(' at')} at character {error.pos}); correct it."
    if isinstance(error, UnicodeDecodeError):
        return f"The body is not UTF-8 at byte {error.start}; convert it."
    return f"A number in the body is too long to be read ({error}); shorten it."


def in_api_words(sentence: str, api_names: Mapping[str, str]) -> tuple[str, str | None]:
    """The engine's `sentence` about one of its sampling options, with which it begins, and the field of the request."""
    option, _, rest = sentence.partition(" ")
    if option not in api_names:
        return sentence, None
    return f"{api_names[option]} {rest}", api_names[option]


def no_such_path(path: str) -> str:
    """For 404."""
    return f"There is no '{path:.100}' here; ask /v1/chat/completions, /v1/completions or /v1/models."


def wrong_method(path: str, method: str, allowed: str) -> str:
    """For 405."""
    return f"'{path:.100}' takes no {method}; use {allowed}."
