"""A store of an older schema becomes one of this schema: its manifest is written again, no weight is touched.

Asked for by name (`moespeq upgrade`) and never done in passing: a store may be read-only, shared, or in use by an older
version. The new manifest replaces the old one in one rename, after it was checked against the store's files, so
whatever interrupts this leaves a whole store of one schema or of the other.

    1 -> 2   experts_file_bytes was one number, since expert records lay in one file
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moespeq.errors import StorageError, StoreError
from moespeq.model_place import MANIFEST_NAME, require_store
from moespeq.store.manifest import SCHEMA, UPGRADABLE, parse_values, read_values
from moespeq.store.reader import Store
from moespeq.whole_file import write_whole

__all__ = ["upgrade_store"]


def upgrade_store(store: Path) -> int | None:
    """Bring the store to this schema; returns the schema it had, None where that is this one already.

    Raises StoreError for a damaged store or a schema that no step begins at, StorageError when it cannot be written.
    """
    require_store(store)
    path = store / MANIFEST_NAME
    values = read_values(path)
    found: int = values.pop("schema")
    if found == SCHEMA:
        Store.open(store).close()
        return None
    for schema in range(found, SCHEMA):
        try:
            _STEPS[schema](values)
        except (KeyError, TypeError) as error:
            raise StoreError(f"{path} lacks {error} of schema {schema}; prepare the store again.") from error
    manifest = parse_values(values, path)
    Store.from_manifest(store, manifest).close()
    try:
        write_whole(path, manifest.to_json())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror}); check the disk and its permissions."
        ) from error
    return found


def _several_files(values: dict[str, Any]) -> None:
    values["experts_file_bytes"] = [values["experts_file_bytes"]]


_STEPS: dict[int, Callable[[dict[str, Any]], None]] = {1: _several_files}
assert tuple(_STEPS) == UPGRADABLE
