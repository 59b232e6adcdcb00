"""A cold start: from opening a store that lies on a disk to the first token, and to all records in host memory.

    floor = (dense + base + records) bytes / disk rate

The disk's rate is measured first, on the store's own largest file and around the page cache; the records are read
around it too, so that a second start is as cold as the first. The kernels' compilation is part of a start: whether it
was cached is the machine's state, and `load_s` of the warm rows says what it takes then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import moespeq
from moespeq.hardware.disk import measure_reads

_NUM_THREADS = 8
_MEASURED_BYTES = 4 << 30
_LOOK_EVERY_S = 0.02


def measure_cold_start(store: Path, tokens: Sequence[int], **options: Any) -> dict[str, Any]:
    """Seconds from the start: engine open, first token, host memory full; and the disk's floor under the last."""
    largest = max((path for path in store.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    disk = measure_reads(largest, num_threads=_NUM_THREADS, max_bytes=_MEASURED_BYTES)
    begin_s = time.perf_counter()
    with moespeq.load(store, **options) as engine:
        opened_s = time.perf_counter() - begin_s
        filled_bytes = engine.host_fill.filled_bytes
        answer = engine.generate(tokens, max_new_tokens=1, temperature=0.0, ignore_eos=True)
        at_first = engine.host_fill
        while not engine.host_fill.is_full:
            time.sleep(_LOOK_EVERY_S)
        full_s = time.perf_counter() - begin_s
        plan = engine.plan
    read_bytes = plan.dense_bytes + plan.base_bytes + at_first.total_bytes
    return {
        "disk_bytes_per_s": disk.bytes_per_s,
        "is_direct": disk.is_direct,
        "opened_s": opened_s,
        "filled_when_opened_bytes": filled_bytes,
        "first_token_s": opened_s + answer.stats.ttft_s,
        "is_first_token_before_full": not at_first.is_full,
        "full_s": full_s,
        "read_bytes": read_bytes,
        "floor_s": read_bytes / disk.bytes_per_s,
    }
