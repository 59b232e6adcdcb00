"""Result JSON as text: Markdown tables, also what run.py prints. Only reads; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rows import ROWS
from shapes import GIB, SHAPES

Result = Mapping[str, Any]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table: the first column to the left, figures to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return [line(header), rule, *map(line, rows)]


def title_of(result: Result) -> str:
    """The shape, and the device memory where it is not what the shape is measured in."""
    shape, budget_bytes = result["shape"], result["budget_bytes"]
    if shape not in SHAPES or SHAPES[shape].budget_bytes == budget_bytes:
        return str(shape)
    return f"{shape}-{budget_bytes / GIB:g}-gib"


def floor_lines(result: Result) -> list[str]:
    """What the bytes alone would take, before anything that was measured."""
    lines = [f"link {name}: {rate / 1e9:.1f} GB/s" for name, rate in result["floor"]["link_bytes_per_s"].items()]
    for entry in result["summary"]:
        if entry["runs"]:
            moved_gb, floor_s = entry["bytes_per_tok"]["median"] / 1e9, entry["floor_tpot_s"]
            lines.append(f"floor {entry['row']} {entry['link']}: {moved_gb:.3f} GB a token, {_ms(floor_s)} ms")
    return ["", *lines, ""]


def runs_table(result: Result) -> list[str]:
    """TPOT of every row and link with its floor, and how it compares with the baseline."""
    header = (
        "row", "link", "prompts", "tok/s", "TPOT ms (IQR)", "floor ms", "x floor", "speedup", "GB/token", "committed",
        "accepted", "draft ms", "verify ms", "stalled", "link util. in stalls",
    )  # fmt: skip
    failures = [
        f"Failed: {label_of(entry['row'])}, {entry['link']}: {error}"
        for entry in result["summary"]
        for error in entry["errors"]
    ]
    left_out = [(label_of(row), why, *("-",) * (len(header) - 2)) for row, why in result.get("left_out", {}).items()]
    return [*table(header, [*map(_run_cells, result["summary"]), *left_out]), "", *failures, ""]


def ttft_table(result: Result) -> list[str]:
    """Time to first token by prompt length."""
    entries = result.get("ttft_summary", [])
    if not entries:
        return []
    cells = [
        (
            label_of(entry["row"]),
            str(entry["prompt_tok"]),
            _ms(entry["ttft_s"]["median"]),
            _ms(entry["floor_s"]),
            figure(entry["ratio"]),
        )
        for entry in entries
    ]
    return [*table(("row", "prompt tokens", "TTFT ms", "floor ms", "x floor"), cells), ""]


def ratio_lines(result: Result) -> list[str]:
    """Comparisons of two rows, a line each."""
    return [f"- {name}: {value:.3g}" for name, value in result.get("ratios", {}).items()]


def label_of(row: str) -> str:
    """What a row is called for people."""
    return ROWS[row].label if row in ROWS else row


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _run_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if not entry["runs"]:
        return (label_of(entry["row"]), entry["link"], "0", "failed", *("-",) * 11)
    tpot = entry["tpot_s"]
    return (
        label_of(entry["row"]),
        entry["link"],
        str(entry["runs"]),
        figure(entry["tok_per_s"], 1),
        f"{_ms(tpot['median'])} ({_ms(tpot['q3'] - tpot['q1'])})",
        _ms(entry["floor_tpot_s"]),
        figure(entry["ratio"]),
        figure(entry["speedup"]),
        figure(entry["bytes_per_tok"]["median"] / 1e9, 3),
        figure(entry["committed_per_round"], 1),
        percent(entry["acceptance"]),
        _ms(entry["draft_s_per_tok"]),
        _ms(entry["verify_s"]),
        percent(entry["stall_share"]),
        percent(entry["stall_link_utilisation"]),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"
