"""What one set of weights and one KV cache for draft and target save, against a draft that is a model of its own."""

from __future__ import annotations

from dataclasses import dataclass

from moespeq.plan.memory import MemoryNeeds, MemoryPlan

__all__ = ["Sharing", "sharing_of"]

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Sharing:
    """Memory that a draft of its own would take beside the same target with as many experts in slots and host memory.

    dense_bytes, kv_bytes: its embeddings, attention and cache once more; slots_bytes, host_bytes: what bf16 experts
    take more than residuals. unshared_bytes: all memory of such an engine, the device's and the host's.
    """

    dense_bytes: int
    kv_bytes: int
    slots_bytes: int
    host_bytes: int
    unshared_bytes: int

    @property
    def saved_bytes(self) -> int:
        """All four."""
        return self.dense_bytes + self.kv_bytes + self.slots_bytes + self.host_bytes

    @property
    def saved_share(self) -> float:
        """Of the memory without sharing."""
        return self.saved_bytes / self.unshared_bytes


def sharing_of(plan: MemoryPlan, needs: MemoryNeeds) -> Sharing | None:
    """None where nothing is drafted, so that nothing is shared."""
    if not plan.num_bases:
        return None
    bf16_bytes = 0 if needs.is_complete else _BF16_BYTES * needs.shape.weights_per_expert
    more_bytes = max(0, bf16_bytes - needs.slot_bytes)
    in_slots_bytes = plan.num_slots * more_bytes
    in_host_bytes = plan.host_bytes // needs.slot_bytes * more_bytes
    saved_bytes = plan.dense_bytes + plan.kv_bytes + in_slots_bytes + in_host_bytes
    unshared_bytes = plan.total_bytes + plan.host_bytes + saved_bytes
    return Sharing(plan.dense_bytes, plan.kv_bytes, in_slots_bytes, in_host_bytes, unshared_bytes)
