"""A file whose disk fails: one file served through FUSE, where reads that touch some bytes end in EIO.

    unshare --map-root-user --mount python tests/failing_disk.py FILE BAD_OFFSET FOLDER COMMAND...

Mounts FOLDER with FILE in it, lays that over FILE itself, and runs COMMAND: whoever opens FILE meets the fault. The
kernel's protocol is spoken here, as much of it as one read-only file needs: neither libfuse nor a package.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_GETXATTR, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR, _ACCESS, _BATCH_FORGET = 22, 25, 26, 27, 29, 34, 42
_ROOT, _FILE, _PAGE = 1, 2, 4096
_IN = struct.Struct("<IIQQIII4x")  # length, opcode, unique, node, uid, gid, pid
_NO_ANSWER = frozenset({_FORGET, _BATCH_FORGET})


class FailingFile:
    """Serves the requests for one file until its mount is gone."""

    def __init__(self, path: Path, bad_offset: int) -> None:
        self._name, self._fd, self._bad = path.name.encode(), os.open(path, os.O_RDONLY), bad_offset
        self._size = os.fstat(self._fd).st_size
        self._device = os.open("/dev/fuse", os.O_RDWR)

    def mount(self, folder: Path) -> None:
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"failing", os.fsencode(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                raise
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in _NO_ANSWER:
                continue
            try:
                answer, code = self._answer(opcode, node, request[_IN.size :]), 0
            except OSError as error:
                answer, code = b"", -(error.errno or errno.EIO)
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), code, unique) + answer)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 16, 0, 0)
        if opcode == _LOOKUP:
            if body.rstrip(b"\0") != self._name:
                raise OSError(errno.ENOENT, "no such file")
            return struct.pack("<QQQQII", _FILE, 0, 1, 1, 0, 0) + self._attributes(_FILE)
        if opcode == _GETATTR:
            return struct.pack("<QII", 1, 0, 0) + self._attributes(node)
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, 1, 0)  # direct: every read comes here
        if opcode == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            if offset <= self._bad < offset + size:
                raise OSError(errno.EIO, "the medium fails")
            return os.pread(self._fd, size, offset)
        if opcode in (_FLUSH, _RELEASE, _RELEASEDIR, _ACCESS):
            return b""
        raise OSError(errno.ENOSYS, "not served")

    def _attributes(self, node: int) -> bytes:
        mode, size = (stat.S_IFDIR | 0o755, 0) if node == _ROOT else (stat.S_IFREG | 0o644, self._size)
        return struct.pack(
            "<QQQQQQIIIIIIIIII", node, size, -(-size // 512), *[1] * 3, *[0] * 3, mode, 1, *[0] * 3, _PAGE, 0
        )


def main(path: Path, bad_offset: int, folder: Path, command: list[str]) -> int:
    file = FailingFile(path, bad_offset)
    file.mount(folder)
    threading.Thread(target=file.serve, daemon=True).start()
    subprocess.run(["mount", "--bind", folder / path.name, path], check=True)
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
