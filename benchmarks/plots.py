"""Figures of one result, as SVG that is equal for equal results: no date, no random ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "moespeq"
mpl.rcParams["font.size"] = 9
from matplotlib.axes import Axes  # noqa: E402 - the backend is chosen before
from matplotlib.figure import Figure  # noqa: E402

from tables import label_of, title_of  # noqa: E402

Result = Mapping[str, Any]
_MEASURED, _FLOOR = "#4477aa", "#222222"


def draw(result: Result, folder: Path) -> list[Path]:
    """Write the figures of `result`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_save(_tpot_figure(result), folder / f"{title_of(result)}-tpot.svg")]
    if result.get("ttft_summary"):
        paths.append(_save(_ttft_figure(result), folder / f"{title_of(result)}-ttft.svg"))
    return paths


def _tpot_figure(result: Result) -> Figure:
    """A bar a row with its quartiles, and a line where its floor is; one panel a link."""
    links = list(result["floor"]["link_bytes_per_s"])
    groups = {link: [entry for entry in result["summary"] if entry["link"] == link and entry["runs"]] for link in links}
    height = 1.3 + 0.32 * max(1, *map(len, groups.values()))
    drawing = Figure(figsize=(5.2 * len(links), height), layout="constrained")
    axes = drawing.subplots(1, len(links), squeeze=False, sharey=True)[0]
    for panel, (link, entries) in zip(axes, groups.items(), strict=True):
        _draw_tpot(panel, entries)
        panel.set_title(f"{title_of(result)}, link {link},\n{result['device']['name']}")
    axes[0].invert_yaxis()  # of all panels, which share it: the first row on top
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
    return drawing


def _draw_tpot(panel: Axes, entries: list[Mapping[str, Any]]) -> None:
    places = range(len(entries))
    spreads = [entry["tpot_s"] for entry in entries]
    median_ms = [1e3 * each["median"] for each in spreads]
    below = [1e3 * (each["median"] - each["q1"]) for each in spreads]
    above = [1e3 * (each["q3"] - each["median"]) for each in spreads]
    panel.barh(places, median_ms, color=_MEASURED, xerr=(below, above), label="measured")
    floors_ms = [1e3 * entry["floor_tpot_s"] for entry in entries]
    panel.scatter(floors_ms, places, marker="|", s=160, color=_FLOOR, zorder=3, label="floor")
    panel.set_yticks(places, [label_of(entry["row"]) for entry in entries])
    panel.set_xlabel("ms a token")


def _ttft_figure(result: Result) -> Figure:
    """TTFT over prompt length, a line a row, its floor dashed."""
    drawing = Figure(figsize=(5.2, 3.2), layout="constrained")
    panel = drawing.subplots()
    rows = list(dict.fromkeys(entry["row"] for entry in result["ttft_summary"]))
    for row in rows:
        entries = [entry for entry in result["ttft_summary"] if entry["row"] == row]
        lengths = [entry["prompt_tok"] for entry in entries]
        (line,) = panel.plot(lengths, [entry["ttft_s"]["median"] for entry in entries], "o-", label=label_of(row))
        panel.plot(lengths, [entry["floor_s"] for entry in entries], "--", color=line.get_color())
    panel.set_xscale("log", base=2)
    panel.set_xlabel("prompt tokens")
    panel.set_ylabel("s to the first token (dashed: floor)")
    panel.legend()
    return drawing


def _save(drawing: Figure, path: Path) -> Path:
    drawing.savefig(path, format="svg", metadata={"Date": None})
    return path
