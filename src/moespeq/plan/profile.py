"""What a machine was measured to do, as a file the planner reads: bandwidths, and some models' times on it.

Written by `moespeq profile` and read strictly: a guess must not become a plan. A profile of another schema counts as
none and is written anew; a file that is no profile at all is an error, and nobody's to write over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from moespeq.cache_folder import cache_folder
from moespeq.errors import StorageError, UsageError
from moespeq.whole_file import write_whole

__all__ = ["SCHEMA", "DiskRate", "MachineProfile", "ModelTimes", "default_profile_path", "require_writable"]

SCHEMA = 2
_MOST = 1e15  # seconds, bytes or bytes a second: what is more was not measured


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
    """Bandwidths in bytes a second by block size; `pinned_copy` is empty without a GPU or where pinning is refused.

    models: each by its name, whenever it was measured.
    """

    device: str
    pinned_copy: Mapping[int, float]
    pageable_copy: Mapping[int, float]
    disk: tuple[DiskRate, ...]
    models: tuple[ModelTimes, ...] = ()

    def link_bytes_per_s(self, block_bytes: int) -> float:
        """The link for blocks of about this size: the copies the mover makes, else those that are possible."""
        rates = self.pinned_copy or self.pageable_copy
        return rates[min(rates, key=lambda measured: abs(math.log(measured / block_bytes)))]

    @property
    def disk_bytes_per_s(self) -> float:
        """The disk at its best."""
        return max(rate.bytes_per_s for rate in self.disk)

    def times_of(self, model: str) -> ModelTimes | None:
        """What was measured of a model."""
        return next((times for times in self.models if times.model == model), None)

    def with_models_of(self, earlier: MachineProfile) -> MachineProfile:
        """This profile, and the times of models that only an `earlier` one of the same device has."""
        if earlier.device != self.device:
            return self
        kept = [times for times in earlier.models if self.times_of(times.model) is None]
        return replace(self, models=(*kept, *self.models))

    def to_json(self) -> str:
        """The file's text; equal profiles give equal texts."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> MachineProfile:
        """Inverse of `to_json`. Raises ValueError for another schema or anything unexpected."""
        try:
            values = json.loads(text)
            if values.pop("schema") != SCHEMA:
                raise ValueError(f"it is not of schema {SCHEMA}")
            return cls(
                device=_text(values.pop("device")),
                pinned_copy=_by_size(values.pop("pinned_copy")),
                pageable_copy=_some(_by_size(values.pop("pageable_copy"))),
                disk=_some(tuple(_disk_rate(rate) for rate in values.pop("disk"))),
                models=tuple(_model_times(times) for times in values.pop("models")),
                **values,
            )
        except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; `require_writable` made its folder. Raises StorageError."""
        try:
            write_whole(path, self.to_json())
        except OSError as error:
            raise StorageError(_unwritable(path, error)) from error

    @classmethod
    def load(cls, path: Path) -> MachineProfile | None:
        """The profile at `path`; None where there is none, or one that another version wrote. Raises UsageError."""
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{path} cannot be read as a profile ({error.strerror}); check the path.") from error
        if _is_of_another_schema(text):
            return None
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise UsageError(
                f"{path} cannot be read as a profile ({error}); delete it, then run `moespeq profile`."
            ) from error


def default_profile_path() -> Path:
    """Where `moespeq profile` writes unless told otherwise."""
    return cache_folder() / "profile.json"


def require_writable(path: Path) -> None:
    """Make the folder of a profile, before anything is measured for it. Raises UsageError or StorageError."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file; give --out the name of one.")
    try:
        folder = path.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StorageError(_unwritable(path, error)) from error


def _unwritable(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror}); give another --out, or make room."


def _is_of_another_schema(text: str) -> bool:
    """Whether this is a profile, but one that another version wrote."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    is_profile = isinstance(values, dict) and {"schema", "pinned_copy", "disk"} <= values.keys()
    return is_profile and values["schema"] != SCHEMA


def _model_times(values: Mapping[str, Any]) -> ModelTimes:
    given = _only(ModelTimes, values)
    return ModelTimes(
        model=_text(given["model"]),
        draft_s_per_tok=_rate(given["draft_s_per_tok"]),
        verify_s=_some(_by_size(given["verify_s"])),
        decode_bytes_per_s=_rate(given["decode_bytes_per_s"]),
    )


def _disk_rate(values: Mapping[str, Any]) -> DiskRate:
    given = _only(DiskRate, values)
    return DiskRate(int(given["num_threads"]), _rate(given["bytes_per_s"]), bool(given["is_direct"]))


def _by_size(values: Mapping[str, float]) -> dict[int, float]:
    """JSON keys are texts."""
    return {int(_rate(int(size))): _rate(rate) for size, rate in values.items()}


def _rate(value: Any) -> float:
    """A time, size or bandwidth: what is divided by must be above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MOST:
        raise ValueError(f"{value!r} is no number above 0 and below {_MOST:g}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _some(values: Any) -> Any:
    """At least one of what is measured several times."""
    if not values:
        raise ValueError("a table is empty")
    return values


def _only(kind: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values`, where they are exactly a dataclass's fields."""
    expected = {field.name for field in fields(kind)}
    if set(values) != expected:
        raise ValueError(f"{sorted(values)} are not the fields {sorted(expected)}")
    return values
