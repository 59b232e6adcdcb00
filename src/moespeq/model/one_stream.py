"""The CUDA stream that an engine belongs to."""

from __future__ import annotations

import torch

from moespeq.errors import UsageError

__all__ = ["OneStream"]


class OneStream:
    """The stream an engine was loaded under; on a CPU there are none.

    Events and fences lie on it: work on another one would overtake copies without anybody seeing it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def check(self) -> None:
        """Raise UsageError under another one."""
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            raise UsageError(
                "This engine was loaded under another CUDA stream than the current one; generate under the same stream."
            )
