"""The amortization roofline of a recorded run: tokens a second against tokens a waited-for byte serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moespeq.figures.canvas import sheet
from moespeq.replay import RoutingTrace
from moespeq.replay.early_stop import EarlyStop, early_stop
from moespeq.replay.roofline_points import Roofline, roofline_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_roofline"]

_OURS, _PAPER, _ROOF, _MEASURED = "#0072b2", "#d55e00", "#333333", "#000000"
_DASHED, _DOTTED = (0, (4, 2)), (0, (1, 1.5))


def draw_roofline(trace: RoutingTrace, path: Path) -> None:
    """Theta(k) against I_amort(k) with both roofs, written to `path`. Needs matplotlib.

    Raises TraceError where the trace holds no round.
    """
    found = roofline_points(trace)
    title = f"Amortization roofline: {found.model}"
    with sheet(
        path, title=title, caption=_caption(found, early_stop(trace, found)), width_in=7.4, height_in=4.0
    ) as figure:
        panel = figure.subplots()
        panel.set(xscale="log", yscale="log")
        edge = _draw_roofs(panel, found)
        _draw_paper(panel, found, edge)
        _draw_ours(panel, found, edge)
        _draw_measured(panel, found, edge)
        panel.set(xlabel="intensity: tokens x bytes of a token's experts / bytes waited for", ylabel="tokens a second")
        _number_plainly(panel)
        figure.legend(loc="outside right upper")


def _caption(found: Roofline, stop: EarlyStop) -> str:
    best = next(point for point in found.points if point.k == found.best_k)
    plain = next(point for point in found.points if point.k == 0)
    return (
        f"Best depth: {found.best_k} ({best.tokens_per_s:.3g} tok/s; without a draft {plain.tokens_per_s:.3g}). The "
        f"paper's formula takes {found.paper_k}: it counts accepted tokens only and hides none of the link behind the "
        f"verify. The recorded run committed most tokens at {found.recorded_k}. Ending drafts early where their tokens "
        f"are doubtful would change tokens a second by {stop.gain:+.1%}. Depths are replayed."
    )


def _draw_roofs(panel: Axes, found: Roofline) -> float:
    """Both roofs; returns where depths stand that wait for nothing."""
    intensities = [point.intensity for point in found.points] + [point.paper_intensity for point in found.points]
    intensities += [point.intensity for point in found.measured]
    ridge = found.compute_roof / found.io_roof if found.io_roof else 1.0
    finite = [value for value in intensities if 0.0 < value < math.inf] + [ridge]
    left, right = 0.7 * min(finite), 1.5 * max(finite)
    if found.io_roof:
        places, heights = [left, ridge], [left * found.io_roof, found.compute_roof]
        panel.plot(places, heights, color=_ROOF, linestyle=_DOTTED, label="roof: the link")
    label = "roof: draft and verify"
    panel.plot([ridge, right], [found.compute_roof] * 2, color=_ROOF, linestyle=_DASHED, label=label)
    panel.set_xlim(left, right)
    return right / 1.05


def _draw_ours(panel: Axes, found: Roofline, edge: float) -> None:
    places = [min(point.intensity, edge) for point in found.points]
    heights = [point.tokens_per_s for point in found.points]
    panel.plot(places, heights, "o-", color=_OURS, markersize=4, label="ours, k as written")
    _write_depths(panel, places, heights, [point.k for point in found.points], _OURS, (0, 7))
    at = [point.k for point in found.points].index(found.best_k)
    _ring(panel, places[at], heights[at], _OURS, f"ours: best k = {found.best_k}")


def _draw_paper(panel: Axes, found: Roofline, edge: float) -> None:
    drafted = [point for point in found.points if point.paper_tokens_per_s > 0.0]
    if not drafted:
        return
    places = [min(point.paper_intensity, edge) for point in drafted]
    heights = [point.paper_tokens_per_s for point in drafted]
    depths = [point.k for point in drafted]
    panel.plot(places, heights, "s-", color=_PAPER, markersize=3, linewidth=1.0, label="the paper's formula")
    _write_depths(panel, places, heights, depths, _PAPER, (0, -13))
    if found.paper_k in depths:
        at = depths.index(found.paper_k)
        _ring(panel, places[at], heights[at], _PAPER, f"the paper's: best k = {found.paper_k}")


def _draw_measured(panel: Axes, found: Roofline, edge: float) -> None:
    if not found.measured:
        return
    places = [min(point.intensity, edge) for point in found.measured]
    heights = [point.tokens_per_s for point in found.measured]
    panel.plot(places, heights, "x", color=_MEASURED, label="recorded rounds, by k")
    _write_depths(panel, places, heights, [point.k for point in found.measured], _MEASURED, (7, -3))


def _write_depths(
    panel: Axes,
    places: Sequence[float],
    heights: Sequence[float],
    depths: Sequence[int],
    color: str,
    offset: tuple[int, int],
) -> None:
    for place, height, k in zip(places, heights, depths, strict=True):
        panel.annotate(
            str(k), (place, height), offset, textcoords="offset points", ha="center", fontsize=7, color=color
        )


def _ring(panel: Axes, place: float, height: float, color: str, label: str) -> None:
    panel.plot([place], [height], "o", color=color, markersize=11, fillstyle="none", linestyle="none", label=label)


def _number_plainly(panel: Axes) -> None:
    """1, 2, 5, 10, ... in place of powers of ten."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
