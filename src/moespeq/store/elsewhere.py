"""Files of expert records on other disks than their store's: links in the store, and which links it may hold.

A store is one folder that can be moved, copied and given away, so nothing in it may lead out of it, with one exception:
a file of records that `prepare` put elsewhere, because one disk was too small or two are read faster than one. Its name
there says what it is and is new for every store, so a link of a store from anywhere cannot name a file of another kind.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from moespeq.errors import StoreError, UsageError

__all__ = ["link_elsewhere", "require_inside", "require_separate"]

_RECORD_FILES = ("base.bin", "experts")  # how the names of files of records begin


def link_elsewhere(link: Path, folder: Path, store_name: str) -> None:
    """Make `link` one to a file in `folder` that is not there yet; a link that is there stays. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(folder.resolve() / f"{store_name}-{secrets.token_hex(4)}.{link.name}")


def require_separate(out: Path, folders: Sequence[Path]) -> None:
    """Raise UsageError for a folder that is given twice, or lies in the store `out`, which is renamed at the end."""
    places = [folder.resolve() for folder in folders]
    for place in places:
        if places.count(place) > 1:
            raise UsageError(f"{place} is given twice for expert records; give each disk once.")
        if place.is_relative_to(out.resolve()) or place.is_relative_to(out.with_name(f"{out.name}.partial").resolve()):
            raise UsageError(f"{place} lies in the store itself; give a folder on another disk.")


def require_inside(path: Path, store: Path) -> None:
    """Raise StoreError for a file of `store` that leads out of it, and is no file of records put elsewhere."""
    place = Path(os.path.realpath(path))
    if place.is_relative_to(os.path.realpath(store)):
        return
    if not path.name.startswith(_RECORD_FILES) or not place.name.endswith(path.name):
        raise StoreError(f"{path} is a link out of the store, to {place}; prepare the store again.")
