"""Hit rate against cache size: recorded routes through caches that only demand fills.

One cache for all layers, records of equal size, starting empty, one request at a time: for each pass over `rows`
tokens the distinct experts of every layer, in layer order. With one row that is plain decoding; with more it is a
verify, and the text is cut into passes of `rows` as if every draft were accepted. A pass uses a record once and comes
back to it a whole scan later, so with many rows what was used longest ago is what comes next: LRU gives away exactly
that, and hits little until nearly everything fits.

These are textbook policies to compare with. What the engine does is residency/eviction, and what it costs is replay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop

from moespeq.replay.bound import belady_misses
from moespeq.replay.routing_trace import Routes

__all__ = ["CACHE_SHARES", "POLICIES", "CacheStudy", "lfu_misses", "lru_misses", "study_cache"]

CACHE_SHARES = (0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)


def lru_misses(uses: Sequence[int], *, num_slots: int) -> int:
    """Fetches where the least recently used record leaves."""
    order: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for record in uses:
        if record in order:
            order.move_to_end(record)
            continue
        misses += 1
        if len(order) == num_slots:
            order.popitem(last=False)
        order[record] = None
    return misses


def lfu_misses(uses: Sequence[int], *, num_slots: int) -> int:
    """Fetches where the record with the fewest uses so far leaves, of equal ones the least recently used.

    Counts outlive eviction. The heap holds one entry for each resident record, as it stood when it was put in: since
    then it can only have grown, so the top is brought up to date until it is true.
    """
    count: Counter[int] = Counter()
    last_place: dict[int, int] = {}
    resident: set[int] = set()
    ranked: list[tuple[int, int, int]] = []  # heap of (count, last place, record)
    misses = 0
    for place, record in enumerate(uses):
        count[record] += 1
        last_place[record] = place
        if record in resident:
            continue
        misses += 1
        if len(resident) == num_slots:
            rank = heappop(ranked)
            while rank != (now := (count[rank[2]], last_place[rank[2]], rank[2])):
                rank = heappushpop(ranked, now)
            resident.remove(rank[2])
        resident.add(record)
        heappush(ranked, (count[record], place, record))
    return misses


POLICIES: dict[str, Callable[..., int]] = {"LRU": lru_misses, "LFU": lfu_misses, "MIN": belady_misses}
"""By name, as tables and figures show them; MIN is Belady's, which knows the future."""


@dataclass(frozen=True, slots=True)
class CacheStudy:
    """Hit rates of one kind of pass.

    num_uses: requests in all; num_records: different ones, each a miss once; share [C]: cache size as a share of all
    routed experts; hit_rate: policy -> [C], 1 - misses / num_uses.
    """

    rows: int
    num_uses: int
    num_records: int
    share: Sequence[float]
    hit_rate: dict[str, list[float]]

    @property
    def ceiling(self) -> float:
        """The hit rate where only first uses miss."""
        return 1 - self.num_records / self.num_uses


def study_cache(routes: Sequence[Routes], *, rows: int, num_experts: int) -> CacheStudy:
    """Every policy at every cache size, over passes of `rows` tokens."""
    uses = _uses(routes, rows, num_experts)
    num_slots = [max(1, round(share * len(routes[0]) * num_experts)) for share in CACHE_SHARES]
    hit_rate = {
        name: [1 - misses(uses, num_slots=slots) / len(uses) for slots in num_slots]
        for name, misses in POLICIES.items()
    }
    return CacheStudy(rows, len(uses), len(set(uses)), CACHE_SHARES, hit_rate)


def _uses(routes: Sequence[Routes], rows: int, num_experts: int) -> list[int]:
    """Requests in order, a record as layer * E + expert."""
    return [
        layer * num_experts + expert
        for start in range(0, len(routes), rows)
        for layer in range(len(routes[0]))
        for expert in sorted({expert for token in routes[start : start + rows] for expert in token[layer]})
    ]
