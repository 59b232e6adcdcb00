"""Options are checked once, and what is refused names the legal range or the nearest name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from moespeq.config import (
    ROW_BUCKETS,
    LoadOptions,
    format_at_least,
    format_bytes,
    format_count,
    nearest_name,
    parse_bytes,
)
from moespeq.errors import UsageError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        (4096, 4096),
        (0, 0),
        ("12GiB", 12 * 2**30),
        ("12gib", 12 * 2**30),
        ("12 GB", 12 * 10**9),
        ("12G", 12 * 10**9),
        ("1.5MiB", 3 * 2**19),
        (" 7 KiB ", 7168),
        ("3b", 3),
        ("2TiB", 2**41),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "12 apples", "-5", "1e9", "12GiB/s", "1,5MB", True, None])
def test_what_is_no_size_is_refused_and_quoted(text: object) -> None:
    with pytest.raises(UsageError, match=f"'{text}' is not a size; write it like 12GiB"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be negative, got -1"):
        parse_bytes(-1)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", "9000000TiB", 2**63])
def test_a_size_no_machine_can_address_is_refused(size: str | int) -> None:
    with pytest.raises(UsageError, match="below 8 EiB"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-2048, "-2.00 KiB"),
        (12.5 * 2**30, "12.50 GiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_keeps_them_above_one(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_every_format_is_a_size_that_is_read_back() -> None:
    for exponent in range(0, 46, 5):
        assert parse_bytes(format_bytes(2**exponent)) == 2**exponent


def test_one_of_a_thing_has_no_s() -> None:
    assert [format_count(number, "token") for number in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_the_nearest_name_is_offered_only_when_one_is_near() -> None:
    assert nearest_name("ctxsize", ["rows", "ctx_size"]) == " Did you mean 'ctx_size'?"
    assert nearest_name("zebra", ["rows", "ctx_size"]) == ""


def test_none_leaves_every_default() -> None:
    assert LoadOptions.from_mapping(dict.fromkeys(field.name for field in fields(LoadOptions))) == LoadOptions()


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"Unknown option 'device_mem'\. Did you mean 'device_memory'\?"):
        LoadOptions.from_mapping({"device_mem": "1GiB"})


def test_sizes_in_a_mapping_may_be_text() -> None:
    options = LoadOptions.from_mapping({"device_memory": "12MiB", "host_memory": 5, "link_bytes_per_s": "25MB"})
    assert options.device_memory == 12 * 2**20
    assert options.host_memory == 5
    assert options.link_bytes_per_s == 25e6


def test_a_mapping_of_nones_is_the_default() -> None:
    nones = {"device_memory": None, "host_memory": None, "rows": None, "ctx_size": None}
    assert LoadOptions.from_mapping(nones) == LoadOptions()


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LoadOptions().k = 3  # type: ignore[misc]


@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_the_longest_draft_has_one_row_less_than_the_bucket(rows: int) -> None:
    assert LoadOptions(rows=rows, k=rows - 1).row_bucket == rows  # whatever the device
    with pytest.raises(UsageError, match=f"k={rows} needs {rows + 1} rows,? (but rows is|and the most are) {rows}"):
        LoadOptions(rows=rows, k=rows)


def test_a_k_too_large_for_rows_names_the_rows_that_hold_it() -> None:
    with pytest.raises(UsageError, match=r"k=17 needs 18 rows, but rows is 17; load with rows=33 \(--rows 33\)\."):
        LoadOptions(device="cpu", k=17)
    with pytest.raises(UsageError, match=r"k=64 needs 65 rows, but rows is 33; load with rows=65 \(--rows 65\)\."):
        LoadOptions(k=64, rows=33)
    with pytest.raises(UsageError, match=r"the most are 65; k is at most 64\."):
        LoadOptions(k=65)


def test_rows_never_follow_from_k() -> None:
    assert {LoadOptions(device="cpu", k=k).row_bucket for k in (0, 1, 16)} == {17}
    assert {LoadOptions(device="cuda", k=k).row_bucket for k in (0, 1, 32)} == {33}


def test_before_the_device_is_chosen_a_k_may_be_as_long_as_any_devices_rows_allow() -> None:
    assert LoadOptions(k=32).k == 32
    with pytest.raises(UsageError, match=r"k=33 needs 34 rows, but rows is 33; load with rows=65 \(--rows 65\)\."):
        LoadOptions(k=33)


def test_on_demand_has_one_row_and_no_draft() -> None:
    assert LoadOptions(mode="on_demand").row_bucket == 1
    assert LoadOptions(mode="on_demand", k=0).row_bucket == 1
    with pytest.raises(UsageError, match="on_demand decodes without a draft"):
        LoadOptions(mode="on_demand", k=4)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("device", "gpu", "use 'auto', 'cpu' or 'cuda'"),
        ("mode", "ondemand", "use 'speculative' or 'on_demand'"),
        ("rows", 16, "1, 17, 33, 65"),
        ("rows", 17.0, "17, 33, 65"),
        ("rows", "17", "17, 33, 65"),
        ("k", -1, "'auto' or a whole number from 0 to 32"),
        ("k", "many", "'auto' or a whole number from 0 to 32"),
        ("k", True, "'auto' or a whole number from 0 to 32"),
        ("k", 1.5, "'auto' or a whole number from 0 to 32"),
        ("ctx_size", 0, "whole number of at least 1"),
        ("ctx_size", "4096", "whole number of at least 1"),
        ("link_threads", 0, "from 1 to 256"),
        ("prefill_rows", 0, "at least 1"),
        ("prefill_rows", 1.5, "whole number of at least 1"),
        ("link_bytes_per_s", 0, "above 0 bytes/s"),
        ("link_bytes_per_s", "fast", "is not a size"),
        ("link_bytes_per_s", -2, "cannot be negative"),
        ("prefetch", "no", "True or False"),
        ("prefetch", 1, "True or False"),
    ],
)
def test_an_illegal_value_is_refused_with_what_is_legal(option: str, value: object, allowed: str) -> None:
    with pytest.raises(UsageError, match=allowed) as caught:
        LoadOptions.from_mapping({option: value})
    assert repr(value).strip("'") in str(caught.value)


@pytest.mark.parametrize("value", [-2.0, float("nan"), float("inf")])
def test_a_bandwidth_is_a_finite_number_above_zero(value: float) -> None:
    with pytest.raises(UsageError, match=f"above 0 bytes/s, got {value}"):
        LoadOptions(link_bytes_per_s=value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"base_memory": "1GiB", "mode": "on_demand"}, "on_demand keeps no base in memory; leave base_memory out"),
        ({"base_memory": "1GiB", "records": "whole"}, "leave records='whole' out"),
        ({"base_memory": "1GiB", "records": "store"}, "leave records='store' out"),
        ({"records": "mixed", "mode": "on_demand"}, "on_demand keeps no base"),
        ({"base_memory": "much"}, "'much' is not a size"),
        ({"records": "whole", "k": 3}, "no base resident to draft with, got k=3"),
    ],
)
def test_a_base_that_cannot_be_kept_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        LoadOptions.from_mapping(options)


def test_a_part_of_the_base_is_enough_to_draft_with() -> None:
    assert LoadOptions.from_mapping({"base_memory": "1GiB", "k": 4}).base_memory == 1 << 30
    assert LoadOptions(records="mixed", k=4).has_draft
    assert not LoadOptions(records="whole").has_draft


def test_every_default_is_legal_and_every_size_is_automatic() -> None:
    options = LoadOptions()
    automatic = {field.name for field in fields(options) if getattr(options, field.name) in (None, "auto")}
    assert automatic == {
        "base_memory",
        "convert_to",
        "device",
        "device_memory",
        "eviction",
        "host_memory",
        "k",
        "rows",
        "ctx_size",
        "itl_budget_ms",
        "link_bytes_per_s",
        "lookahead_tok",
        "records",
        "threads",
    }


@pytest.mark.parametrize("num_bytes", [1, 99, 1023, 1025, 5_513_216, 7_816_448, (1 << 30) + 1, 123_456_789_012])
def test_a_size_that_is_asked_for_is_enough_as_it_is_printed(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes(format_at_least(num_bytes).replace(" ", "")) <= 1.01 * num_bytes + 1


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_a_lookahead_is_at_least_one_step(wrong: object) -> None:
    with pytest.raises(UsageError, match="lookahead_tok must be a whole number of at least 1"):
        LoadOptions.from_mapping({"lookahead_tok": wrong})
