"""Loading says where it is, in bytes, and a sink that raises cancels it with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from moespeq.config import LoadOptions
from moespeq.decode.assembly import open_engine

OPTIONS = LoadOptions(device="cpu")


class Sink:
    """Remembers what it was told; raises at the given update."""

    def __init__(self, raise_at: int | None = None) -> None:
        self.updates: list[tuple[int, int, str]] = []
        self._raise_at = raise_at

    def update(self, done_bytes: int, total_bytes: int, what: str) -> None:
        self.updates.append((done_bytes, total_bytes, what))
        if len(self.updates) == self._raise_at:
            raise KeyboardInterrupt


def test_every_byte_of_dense_weights_and_base_is_counted_once(tiny_store: Path) -> None:
    sink = Sink()
    with open_engine(tiny_store, OPTIONS, progress=sink) as engine:
        total_bytes = engine.plan.dense_bytes + engine.plan.base_bytes
    done = [done_bytes for done_bytes, _, _ in sink.updates]
    assert done == sorted(done)
    assert {total for _, total, _ in sink.updates} == {total_bytes}
    assert total_bytes - done[-1] < 4096, "the last page of the base file is padding"
    assert [*dict.fromkeys(what for _, _, what in sink.updates)] == [
        "building the model",
        "loading all weights: dense",
        "loading all weights: the draft's base",
        "making caches and tokenizer ready",
    ]


@pytest.mark.parametrize("raise_at", [1, -1])
def test_a_sink_that_raises_cancels_the_load_and_the_store_can_be_opened_again(tiny_store: Path, raise_at: int) -> None:
    sink = Sink()
    open_engine(tiny_store, OPTIONS, progress=sink).close()
    raise_at = raise_at if raise_at > 0 else len(sink.updates)
    with pytest.raises(KeyboardInterrupt):
        open_engine(tiny_store, OPTIONS, progress=Sink(raise_at))
    with open_engine(tiny_store, OPTIONS) as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=2).tokens
