"""Runs `prepare` or `export` on a disk that is really full, then makes room and goes on.

    unshare --map-root-user --mount python tests/full_disk.py prepare|export SOURCE MOUNT_POINT

Needs a mount namespace of its own, whose tmpfs nobody else sees. The disk grows a little each time until all
fits, so it fills up in every kind of write; the sentence of each StorageError is printed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moespeq.errors import StorageError
from moespeq.prepare import export, export_checkpoint, prepare, prepare_store
from moespeq.store import writer

STEP_KIB, MOST_KIB = 108, 4096


def main(what: str, source: Path, disk: Path) -> None:
    prepare.COMMIT_BYTES = 60_000
    for module in (writer, export):
        module.require_free = lambda *_: None  # else every run is refused before it writes
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STEP_KIB}k", "none", disk], check=True)
    out = disk / "out"
    for size_kib in range(STEP_KIB, MOST_KIB, STEP_KIB):
        subprocess.run(["mount", "-o", f"remount,size={size_kib}k", "none", disk], check=True)
        try:
            if what == "prepare":
                prepare_store(source, out, device="cpu")
            else:
                export_checkpoint(source, out)
        except StorageError as error:
            print(error, flush=True)
            continue
        break
    subprocess.run(["cp", "-r", out, disk.with_name("rescued")], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
