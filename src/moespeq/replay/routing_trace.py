"""A routing trace: what one real generation routed to, token by token, and what its rounds took.

Owns the file format. Routes are kept by position, not by round: text and routes of an exact engine depend on no k, so
a replay may cut the same text into rounds of any depth. What a draft would have routed to and said at a position is
recorded with the text up to there given, whatever the recorded run drafted.

A file is gzip over lines of JSON: the header, then one line for each generated position, then one for each round.
Shapes: L MoE layers, K experts a token.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from moespeq.errors import TraceError
from moespeq.replay.trace_check import find_fault
from moespeq.whole_file import write_whole

__all__ = ["SCHEMA", "Routes", "RoutingTrace", "TraceHeader", "TracePosition", "TraceRound"]

SCHEMA = 2
Routes = Sequence[Sequence[int]]
"""[L][K]: the experts of one token at every MoE layer, most probable first."""

_KIND = "moespeq routing trace"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What was run, where, and how.

    record_bytes [L]: of one expert's record, as it crossed the link, a layer's mean; link_bytes_per_s: bytes over busy
    time of the recorded run; resident [L]: the experts that had slots when the first round began; draft_step_s: of a
    step along the finished text, with an idle link; options: those of the engine that decide bytes and time, as they
    were in effect.
    """

    model: str
    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    record_bytes: Sequence[int]
    plain_record_bytes: int
    base_bytes: int
    layout: str
    num_slots: int
    device: str
    link_bytes_per_s: float
    resident: Sequence[Sequence[int]]
    draft_step_s: float
    prompt_tok: int
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TracePosition:
    """One generated token and the row that computes its successor.

    true, draft [L][K]: the target's routes of the row, and the draft's; ahead [L][K]: what a one-layer-lookahead
    predictor says, the router of a layer given the input of the layer before (empty for the first layer); step: how
    many draft steps lay between this row and the last verified one; drafted: the token the draft would propose as the
    successor; confidence: the draft's probability of it; accepted: whether the target emits that token too.
    """

    token: int
    true: Routes
    draft: Routes
    ahead: Routes
    step: int
    drafted: int
    confidence: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class TraceRound:
    """One round of the recorded run as measured; k = 0: nothing was drafted. See types.StepReport.

    layer_experts, layer_s [L - 1]: how many distinct experts a layer asked for, and the seconds from when its routes
    were known until the next layer's were, without those it waited for the link.
    """

    k: int
    accepted: int
    committed: int
    hits: int
    late: int
    misses: int
    link_bytes: int
    used_bytes: int
    draft_s: float
    verify_s: float
    stall_s: float
    link_busy_s: float
    layer_experts: Sequence[int]
    layer_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """`positions[i]` is the i-th generated token; together the rounds committed all but the first of them."""

    header: TraceHeader
    positions: Sequence[TracePosition]
    rounds: Sequence[TraceRound]

    def write(self, path: Path) -> None:
        """Write the file at once or not at all. Raises TraceError where the disk refuses."""
        head = {"kind": _KIND, "schema": SCHEMA, "positions": len(self.positions), "rounds": len(self.rounds)}
        lines = [head | asdict(self.header), *map(asdict, self.positions), *map(asdict, self.rounds)]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        try:
            write_whole(path, gzip.compress(text.encode(), mtime=0))
        except OSError as error:
            raise TraceError(f"{path} cannot be written ({error.strerror}); choose another --out.") from error

    @classmethod
    def read(cls, path: Path) -> RoutingTrace:
        """Raises TraceError for what is no trace, is cut short, has another schema, or says what cannot be."""
        if path.exists() and not path.is_file():
            raise TraceError(f"{path} is no regular file; give a trace that `moespeq trace record` made.")
        try:
            lines = iter(_unpacked(path).decode().splitlines())
            head = json.loads(next(lines))
            if head.pop("kind") != _KIND:
                raise ValueError("kind")
        except FileNotFoundError as error:
            raise TraceError(f"{path} does not exist; `moespeq trace record` makes one.") from error
        except OSError as error:
            if not isinstance(error, gzip.BadGzipFile):
                raise TraceError(f"{path} cannot be read ({error.strerror}).") from error
            raise TraceError(_NO_TRACE.format(path)) from error
        except _NOT_JSON as error:
            raise TraceError(_NO_TRACE.format(path)) from error
        schema = head.pop("schema", None)
        if schema != SCHEMA:
            raise TraceError(f"{path} has schema {schema} and this version reads {SCHEMA}; record it again.")
        try:
            counts = head.pop("positions"), head.pop("rounds")
            header = _parse(TraceHeader, head)
            positions = _take(lines, TracePosition, counts[0])
            rounds = _take(lines, TraceRound, counts[1])
        except _NOT_JSON as error:
            raise TraceError(f"{path} is damaged or cut short; record it again.") from error
        trace = cls(header, positions, rounds)
        fault = "more lines than it says" if next(lines, None) is not None else find_fault(trace)
        if fault is not None:
            raise TraceError(f"{path} is damaged ({fault}); record it again.")
        return trace


_NOT_JSON = (EOFError, zlib.error, ValueError, LookupError, StopIteration, AttributeError, TypeError, RecursionError)
_MOST_BYTES = 1 << 30  # unpacked: a hundred times what a thousand tokens of the largest models take
_NO_TRACE = "{} is no routing trace; `moespeq trace record` makes one."


def _unpacked(path: Path) -> bytes:
    with gzip.open(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError("too long")
    return content


def _take(lines: Iterator[str], kind: type[T], count: int) -> list[T]:
    return [_parse(kind, json.loads(next(lines))) for _ in range(count)]


def _parse(kind: type[T], values: dict[str, Any]) -> T:
    if set(values) != {field.name for field in fields(kind)}:  # type: ignore[arg-type]
        raise ValueError(f"not the fields of {kind.__name__}")
    return kind(**values)
