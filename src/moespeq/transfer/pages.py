"""Where pages of host memory come from, and when.

A copy from the other socket's memory crosses the link between the sockets first: pages are asked of the node that the
GPU hangs on. And pages must be there before they are pinned: the driver answers no other call while it pins, and takes
27 to 49 ms for 128 MiB that it must fault in, 3 ms for those that are there.
"""

from __future__ import annotations

import ctypes
import os
import platform

__all__ = ["populate", "prefer_node"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
_PREFERRED = 1  # takes another node's pages where the node is full, instead of failing
_MASK_BITS = 1024


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask for pages of `node` in a range not touched yet; False where the system does not take the wish."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS:
        return False
    mask = (1 << node).to_bytes(_MASK_BITS // 8, "little")
    page = os.sysconf("SC_PAGE_SIZE")
    begin = address // page * page
    result = ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(begin),
        ctypes.c_ulong(address + num_bytes - begin),
        ctypes.c_ulong(_PREFERRED),
        ctypes.c_char_p(mask),
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_uint(0),
    )
    return int(result) == 0


def populate(address: int, num_bytes: int) -> bool:
    """Fault in the pages of a range that begins on one, contents unchanged; False where the system cannot."""
    begin, length = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
    return int(ctypes.CDLL(None).madvise(begin, length, _POPULATE_WRITE)) == 0  # without the interpreter's lock
