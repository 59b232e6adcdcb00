"""What a machine was measured to do, as a file the planner reads: bandwidths, and one model's times on it.

Written by `moespeq profile` and read strictly: a file of another schema is refused, or a guess would become a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moespeq.cache_folder import cache_folder
from moespeq.errors import UsageError

__all__ = ["SCHEMA", "DiskRate", "MachineProfile", "ModelTimes", "default_profile_path"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Sequential reads of whole blocks by some threads; is_direct: around the page cache."""

    num_threads: int
    bytes_per_s: float
    is_direct: bool


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """One model on this machine. verify_s: a pass of so many rows, waiting for the link left out.

    decode_bytes_per_s: bf16 bytes that come out of decoding nested records.
    """

    model: str
    draft_s_per_tok: float
    verify_s: Mapping[int, float]
    decode_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Bandwidths in bytes a second by block size; `pinned_copy` is empty without a GPU or where pinning is refused."""

    device: str
    pinned_copy: Mapping[int, float]
    pageable_copy: Mapping[int, float]
    disk: tuple[DiskRate, ...]
    model: ModelTimes | None = None

    @property
    def link_bytes_per_s(self) -> float:
        """The link at its best: the copies the mover makes, else those that are possible."""
        return max((self.pinned_copy or self.pageable_copy).values())

    @property
    def disk_bytes_per_s(self) -> float:
        """The disk at its best."""
        return max(rate.bytes_per_s for rate in self.disk)

    def to_json(self) -> str:
        """The file's text; equal profiles give equal texts."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MachineProfile:
        """Inverse of `to_json`. Raises UsageError for another schema or anything unexpected."""
        try:
            values = json.loads(text)
            if values.pop("schema") != SCHEMA:
                raise ValueError(f"it is not of schema {SCHEMA}")
            model = values.pop("model")
            return cls(
                device=str(values.pop("device")),
                pinned_copy=_by_size(values.pop("pinned_copy")),
                pageable_copy=_by_size(values.pop("pageable_copy")),
                disk=tuple(_only(DiskRate, rate) for rate in values.pop("disk")),
                model=None if model is None else _model_times(model),
                **values,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"The profile cannot be read ({error}); run `moespeq profile` again.") from error

    def save(self, path: Path) -> None:
        """Write the file, and its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> MachineProfile:
        """Read the file at `path`. Raises UsageError."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror}); run `moespeq profile`.") from error


def default_profile_path() -> Path:
    """Where `moespeq profile` writes unless told otherwise."""
    return cache_folder() / "profile.json"


def _model_times(values: Mapping[str, Any]) -> ModelTimes:
    times: ModelTimes = _only(ModelTimes, {**values, "verify_s": _by_size(values["verify_s"])})
    return times


def _by_size(values: Mapping[str, float]) -> dict[int, float]:
    """JSON keys are texts."""
    return {int(size): float(rate) for size, rate in values.items()}


def _only(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from exactly its fields."""
    expected = {field.name for field in fields(kind)}
    if set(values) != expected:
        raise ValueError(f"{sorted(values)} are not the fields {sorted(expected)}")
    return kind(**values)
