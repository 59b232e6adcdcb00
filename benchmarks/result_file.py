"""The JSON file of one shape: written after every run, gone on with by a later call, and read by report.py.

What two calls add to one file is compared and printed as one measurement, so a call that would measure something else
is refused. Knows neither engines nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moespeq.config import format_bytes
from moespeq.errors import UsageError

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"
Result = dict[str, Any]

_FLAGS = {
    "shape": "--shape",
    "layers": "--layers",
    "seed": "--seed",
    "budget_bytes": "--budget",
    "context_tok": "--context",
    "device": "--device",
    "commit": "--commit",
}


def read_result(path: Path) -> Result:
    """A result of this schema. Raises UsageError."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no result file ({error}); remove it or give another --out.") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{path} has schema {schema} and this version reads {SCHEMA}; measure it again.")
    return result


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """JSON with a line for each entry, and for each item of a long list: small, and its differences are readable."""

    def line(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n " + ",\n ".join(json.dumps(item) for item in value) + "\n]"
        return json.dumps(value)

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(key)}: {line(value)}" for key, value in result.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def check_same(path: Path, known: Mapping[str, Any], asked: Mapping[str, Any], *, may_mix_commits: bool) -> None:
    """Raise UsageError where `known`, the file at `path`, was measured otherwise than is `asked` for now."""
    for name, flag in _FLAGS.items():
        if name not in known or _shown(name, known) == _shown(name, asked):
            continue
        if name == "commit" and may_mix_commits:
            continue
        mix = ", or --mix-commits (each phase keeps its own)" if name == "commit" else ""
        raise UsageError(
            f"{path} holds runs with {flag} {_shown(name, known)}, and this call has {_shown(name, asked)}; "
            f"give {flag} {_shown(name, known)}, another --out{mix}."
        )


def _shown(name: str, result: Mapping[str, Any]) -> str:
    """A value as it would be given on the command line."""
    value = result[name]
    if name == "device":
        return str(value["name"])
    if name == "budget_bytes":
        return f"{value} ({format_bytes(value)})"
    return str(value)
