"""How many experts keep their base on the device where there is no room for all: a bank of some rows, or none.

What the bank does not take becomes slots. A row helps the draft and nothing else: on the link its bytes save what the
same bytes as slots would. Replays seldom found drafting with a part of the base faster than plain decoding without any
(docs/adr/0016), so "auto" keeps none; where a draft is asked for, its bank gets most of the room.
"""

from __future__ import annotations

from typing import Protocol

from moespeq.config import LoadOptions, format_bytes

__all__ = ["BankNeeds", "describe_bank", "least_rows", "plan_bank_rows"]

_BANK_SHARE = 0.85  # of what bank and slots share; in replays 0.75 to 0.95 differ little


class BankNeeds(Protocol):
    """What of a store's needs matters here."""

    @property
    def base_bytes(self) -> int: ...
    @property
    def base_row_bytes(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def num_records(self) -> int: ...


def least_rows(needs: BankNeeds, options: LoadOptions) -> int:
    """The fewest bases that these options keep resident."""
    if not options.has_draft:
        return 0
    if options.records != "mixed":
        return needs.num_records
    asked = _asked_rows(needs, options)
    return 1 if asked is None else asked


def plan_bank_rows(needs: BankNeeds, options: LoadOptions, room_bytes: int) -> int:
    """Rows of a bank of some experts, at least one; `room_bytes` is what it shares with the slots, at least one."""
    asked = _asked_rows(needs, options)
    if asked is not None:
        return asked
    bank_bytes = min(int(_BANK_SHARE * room_bytes), room_bytes - needs.slot_bytes)
    return max(1, min(bank_bytes // needs.base_row_bytes, needs.num_records))


def describe_bank(needs: BankNeeds, options: LoadOptions, num_bases: int, reasons: dict[str, str]) -> None:
    """Say how much of the base is resident, and why."""
    if options.mode == "on_demand":
        return
    all_bytes, bank_bytes = format_bytes(needs.base_bytes), format_bytes(num_bases * needs.base_row_bytes)
    if num_bases == needs.num_records:
        reasons["base"] = f"{all_bytes}: the base of all {num_bases} experts is resident"
    elif num_bases:
        asked = "as asked for" if options.base_memory is not None else f"{_BANK_SHARE:.0%} of what slots and base share"
        reasons["base"] = (
            f"{bank_bytes}, {asked}: the base of the {num_bases} of {needs.num_records} experts used most; the others' "
            f"travels with the residual, and the draft does without them ({all_bytes} would be all of it)"
        )
    else:
        reasons["base"] = (
            f"0 B: the INT4 base, {all_bytes}, travels with its residual and nothing is drafted (k = 0); a k that is "
            f"asked for drafts with as much of it as fits, seldom faster"
        )


def _asked_rows(needs: BankNeeds, options: LoadOptions) -> int | None:
    if options.base_memory is None:
        return None
    return min(options.base_memory // needs.base_row_bytes, needs.num_records)
