"""What a person asks to differ from a recorded run, checked and turned into a setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moespeq.config import ROW_BUCKETS, format_at_least, nearest_name, parse_bytes
from moespeq.errors import UsageError
from moespeq.replay.policies import POLICIES
from moespeq.replay.routing_trace import TraceHeader
from moespeq.replay.what_if import Setting

__all__ = ["LINK_BYTES_PER_S", "Changes", "neighbours"]

LINK_BYTES_PER_S = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 55e9}
"""What 16 lanes carry of large copies out of pinned memory."""

_DEEPEST_K = max(ROW_BUCKETS) - 1


@dataclass(frozen=True, slots=True)
class Changes:
    """Each None is as recorded.

    num_slots: records that fit the device; device_memory: "12GiB", what differs from the recorded is slots'; link: a
    name of LINK_BYTES_PER_S or bytes a second, "25GB"; policy: a name of POLICIES; records: "nested" or "plain".
    """

    k: int | None = None
    num_slots: int | None = None
    device_memory: str | None = None
    link: str | None = None
    policy: str | None = None
    prefetch: bool | None = None
    records: str | None = None

    def apply(self, header: TraceHeader, setting: Setting) -> Setting:
        """`setting` with these changes. Raises UsageError for one that cannot be."""
        if self.k is not None:
            setting = replace(setting, k=_checked_k(self.k))
        setting = self._with_memory(header, setting)
        if self.link is not None:
            link = replace(setting.link, bytes_per_s=_bytes_per_s(self.link))
            setting = replace(setting, link=link)
        options = setting.options
        if self.policy is not None:
            if self.policy not in POLICIES:
                raise UsageError(_unknown("policy", self.policy, list(POLICIES)))
            options = replace(options, eviction=POLICIES[self.policy])
        if self.prefetch is not None:
            options = replace(options, prefetch=self.prefetch)
        return replace(setting, options=options)

    def _with_memory(self, header: TraceHeader, setting: Setting) -> Setting:
        """More slots of the recorded records first, then what fits the same memory of others."""
        if self.num_slots is not None and self.device_memory is not None:
            raise UsageError("Slots and device memory both say how many records fit the device; give one of them.")
        if self.num_slots is not None:
            return _with_slots(header, self._with_records(header, setting), self.num_slots)
        if self.device_memory is not None:
            more_bytes = parse_bytes(self.device_memory) - _recorded_memory(header)
            setting = _with_slots(header, setting, setting.num_slots + more_bytes // max(setting.record_bytes))
        return self._with_records(header, setting)

    def _with_records(self, header: TraceHeader, setting: Setting) -> Setting:
        if self.records not in (None, "nested", "plain"):
            raise UsageError(_unknown("records", str(self.records), ["nested", "plain"]))
        is_plain = min(setting.record_bytes) >= header.plain_record_bytes
        if self.records == "nested" and is_plain:
            raise UsageError(
                "The recorded run moved plain records, and how long nested ones are is unknown; record one."
            )
        if self.records != "plain":
            return setting
        plain_bytes = header.plain_record_bytes
        num_slots = setting.num_slots * max(setting.record_bytes) // plain_bytes
        return _with_slots(header, replace(setting, record_bytes=[plain_bytes] * header.num_layers), num_slots)


def neighbours(setting: Setting, most_slots: int) -> dict[str, Setting]:
    """What else one might buy: each link, and twice the slots, but no more than there are experts."""
    links = {
        name: replace(setting, link=replace(setting.link, bytes_per_s=bytes_per_s))
        for name, bytes_per_s in LINK_BYTES_PER_S.items()
    }
    return links | {"twice the slots": replace(setting, num_slots=min(2 * setting.num_slots, most_slots))}


def _checked_k(k: int) -> int:
    if not 0 <= k <= _DEEPEST_K:
        raise UsageError(f"k must be a whole number from 0 to {_DEEPEST_K}, got {k}.")
    return k


def _with_slots(header: TraceHeader, setting: Setting, num_slots: int) -> Setting:
    if num_slots < 1:
        short = format_at_least((1 - num_slots) * max(setting.record_bytes))
        raise UsageError(f"No record would fit the device: {short} are missing for a first slot; give more memory.")
    return replace(setting, num_slots=min(num_slots, header.num_layers * header.num_experts))


def _recorded_memory(header: TraceHeader) -> int:
    recorded = header.options.get("device_memory")
    if not isinstance(recorded, int):
        raise UsageError("The trace does not say how much device memory its run had; give --slots instead.")
    return recorded


def _bytes_per_s(text: str) -> float:
    if text in LINK_BYTES_PER_S:
        return LINK_BYTES_PER_S[text]
    if not text[:1].isdigit():
        known = list(LINK_BYTES_PER_S)
        meant = nearest_name(text, known)
        raise UsageError(
            f"link '{text}' is unknown; use {', '.join(known)}, or its bytes a second, such as 25GB.{meant}"
        )
    bytes_per_s = parse_bytes(text)
    if bytes_per_s == 0:
        raise UsageError("A link of 0 bytes a second moves nothing; give its bytes a second, such as 25GB.")
    return bytes_per_s


def _unknown(what: str, name: str, known: list[str]) -> str:
    return f"{what} '{name}' is unknown; use one of {', '.join(known)}.{nearest_name(name, known)}"
