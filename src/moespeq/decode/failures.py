"""What a pass or a load that ends early leaves behind: nothing. Leases and memory go back, NaN is cleared."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from moespeq.errors import BudgetError

__all__ = ["cleaned_up", "give_memory_back", "is_out_of_memory"]


class _Loop(Protocol):
    def forget(self) -> None: ...
    def abandon(self) -> None: ...


@contextmanager
def cleaned_up(loop: _Loop) -> Iterator[None]:
    """Around all passes of one request, so that the next one finds the engine as new.

    Raises BudgetError where the device's memory ran out; everything else passes through.
    """
    try:
        yield
    except GeneratorExit:
        raise  # closed between two rounds: no pass was cut
    except BaseException as error:
        loop.forget()
        if not is_out_of_memory(error):
            raise
        give_memory_back(error)
        raise BudgetError(
            "The device ran out of memory in the middle of an answer, perhaps to another process; free some and "
            "ask again, or load with a smaller --device-memory."
        ) from error
    finally:
        loop.abandon()


def is_out_of_memory(error: BaseException) -> bool:
    """torch says so by type; the driver, Triton and cuBLAS, which take memory of their own, in words."""
    words = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in words or "ALLOC_FAILED" in words)
    )


def give_memory_back(error: BaseException) -> None:
    """Let go of what was held where `error` was raised: its traceback would hold all of it for as long as the caller
    looks at the error, who may want to load less in its place.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__  # not its context, which may be the caller's own error
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # or the driver counts it as taken, and so does the next plan
