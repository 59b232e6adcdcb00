"""The handful of CUDA driver calls that a copy takes, called directly.

A record is copied every 90 microseconds on a fast link and torch's wrappers (a stream made current, events of their
own) take half of that; these calls take about one each. They keep the interpreter, because handing it to another thread
takes longer than they do; only waiting releases it. Any thread may call: the first call of a thread makes the device's
context its own. Streams and events of torch are passed by their handles.
"""

from __future__ import annotations

import ctypes
import threading

__all__ = ["CudaDriver", "EventHandle"]

EventHandle = ctypes.c_void_p
_NOT_READY = 600


class CudaDriver:
    """Calls on the context that is current where this is made. Raises RuntimeError with the driver's own words."""

    def __init__(self) -> None:
        self._lib = ctypes.PyDLL("libcuda.so.1")
        self._wait = ctypes.CDLL("libcuda.so.1").cuEventSynchronize
        self._wait.argtypes = [ctypes.c_void_p]
        self._context = ctypes.c_void_p()
        self._bound = threading.local()
        self._check(self._lib.cuCtxGetCurrent(ctypes.byref(self._context)))
        if not self._context:
            raise RuntimeError("no CUDA context is current")
        self._copy = self._lib.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._elapsed = self._lib.cuEventElapsedTime
        self._elapsed.argtypes = [ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p]
        for name in ("cuEventRecord", "cuEventQuery"):
            getattr(self._lib, name).argtypes = [ctypes.c_void_p] * (2 if name == "cuEventRecord" else 1)
        self._lib.cuStreamWaitEvent.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]

    def bind(self) -> None:
        """Make the context current in this thread."""
        if not getattr(self._bound, "is_set", False):
            self._check(self._lib.cuCtxSetCurrent(self._context))
            self._bound.is_set = True

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue a copy from pinned host memory at address `source`."""
        self._check(self._copy(target, source, num_bytes, stream))

    def create_event(self) -> EventHandle:
        """An event that measures time; never destroyed, so keep and reuse it."""
        event = ctypes.c_void_p()
        self._check(self._lib.cuEventCreate(ctypes.byref(event), 0))
        return event

    def record(self, event: EventHandle, stream: int) -> None:
        self._check(self._lib.cuEventRecord(event, stream))

    def wait_on_stream(self, stream: int, event: EventHandle | int) -> None:
        """What is queued on `stream` from here on waits for `event`."""
        self._check(self._lib.cuStreamWaitEvent(stream, event, 0))

    def has_happened(self, event: EventHandle) -> bool:
        code = self._lib.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        self._check(code)
        return True

    def synchronize(self, event: EventHandle) -> None:
        """Block until `event` has happened; takes a processor core."""
        self._check(self._wait(event))

    def elapsed_s(self, begin: EventHandle, end: EventHandle) -> float:
        """Time between two events that have happened."""
        milliseconds = ctypes.c_float()
        self._check(self._elapsed(ctypes.byref(milliseconds), begin, end))
        return milliseconds.value / 1e3

    def _check(self, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError((text.value or b"CUDA error").decode())
