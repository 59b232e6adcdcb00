"""Whether a path can become an output, told before anything is begun."""

from __future__ import annotations

import os
from pathlib import Path

from moespeq.errors import UsageError

__all__ = ["partial_of", "require_new_name", "require_reachable"]


def require_new_name(out: Path) -> None:
    """Raise UsageError unless `out`, and its partial beside it, name something that can be made."""
    if out.name in ("", ".."):
        raise UsageError(f"'{out}' is no name for an output; give a new folder such as ./NAME.")
    require_reachable(out)
    require_reachable(partial_of(out))


def require_reachable(out: Path) -> None:
    """Raise UsageError when a folder at `out` cannot be: too long, below a file, a link to nothing."""
    try:
        os.lstat(out)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); choose another output.") from error
    if out.is_symlink() and not out.exists():
        raise UsageError(f"{out} is a link to nothing; remove it or choose another output.")


def partial_of(out: Path) -> Path:
    """Where `out` is built."""
    return out.with_name(out.name + ".partial")
