"""Capture: a function's device work as one graph, or as pieces that the function itself cuts.

All graphs share one memory pool: their temporaries overlap, so what a replay leaves behind is valid until the next
replay of any graph, and everything that must live longer is a static tensor allocated outside. Captures run on a
stream of their own, as CUDA demands; other threads go on copying meanwhile ("relaxed").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from moespeq.model.graphs.compiled import compiled_layers

__all__ = ["GraphPool", "PieceRecorder"]


class GraphPool:
    """The shared memory of all graphs of an engine."""

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run once without capture, where compilers, libraries and allocators do what a capture must not."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), compiled_layers():
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def capture(self, function: Callable[[PieceRecorder], object]) -> list[torch.cuda.CUDAGraph]:
        """The pieces of `function`, which may cut them through the recorder it is given."""
        torch.cuda.synchronize()
        recorder = PieceRecorder(self._handle)
        with torch.cuda.stream(self._stream), compiled_layers():
            recorder.begin()
            try:
                function(recorder)
            except BaseException:
                with suppress(RuntimeError):  # a capture that failed cannot be ended either; the cause is what counts
                    recorder.end()
                raise
            recorder.end()
        return recorder.pieces


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines of a device: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)


class PieceRecorder:
    """Ends the running capture and begins the next one; everything between two cuts is one graph."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.pieces: list[torch.cuda.CUDAGraph] = []

    def begin(self) -> None:
        self.pieces.append(torch.cuda.CUDAGraph())
        self.pieces[-1].capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> None:
        self.pieces[-1].capture_end()

    def cut(self) -> None:
        """Here the host comes in between."""
        self.end()
        self.begin()
