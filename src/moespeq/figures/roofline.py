"""The amortization roofline of a recorded run: tokens a second against tokens a waited-for byte serves.

Two panels on the same axes, our formula and the paper's, each a line through the depths from 0 on under both roofs.
What one looks for first is largest: the chosen depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moespeq.figures.canvas import sheet
from moespeq.figures.labels import Label, write_labels
from moespeq.replay import RoutingTrace
from moespeq.replay.early_stop import EarlyStop, early_stop
from moespeq.replay.roofline_points import Roofline, roofline_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_roofline"]

_OURS, _PAPER, _ROOF, _MEASURED, _SHADE = "#0072b2", "#d55e00", "#888888", "#000000", "#f3f3f3"
_MARGIN = 1.5  # of the axes, beyond what is drawn
_MANY_NUMBERS = 300.0  # from the least to the most: further apart, 1, 2 and 5 would touch


Line = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Curve:
    """A formula's depths: (k, intensity, tokens a second)."""

    title: str
    color: str
    best_k: int
    points: Sequence[tuple[int, float, float]]


def draw_roofline(trace: RoutingTrace, path: Path) -> None:
    """Theta(k) against I_amort(k) with both roofs, written to `path`. Needs matplotlib.

    Raises TraceError where the trace holds no round.
    """
    found = roofline_points(trace)
    ours, paper = _curves(found)
    title = f"Amortization roofline: {found.model}"
    caption = _caption(found, early_stop(trace, found))
    with sheet(path, title=title, caption=caption, width_in=9.0, height_in=4.4) as figure:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        edge = _set_axes(panels[0], found, [*ours.points, *paper.points])
        for panel, curve in zip(panels, (ours, paper), strict=True):
            panel.set(title=curve.title, xlabel="I(k): tokens x bytes of a token's experts / bytes waited for")
            panel.axvspan(edge / _MARGIN, panel.get_xlim()[1], color=_SHADE, zorder=0)
        panels[0].set_ylabel("tokens a second")
        figure.draw_without_rendering()  # now the panels have their sizes
        for panel, curve in zip(panels, (ours, paper), strict=True):
            roofs, notes = _draw_roofs(panel, found)
            line, labels = _draw_curve(panel, curve, edge)
            measured = _draw_measured(panel, found, edge) if curve is ours else []
            write_labels(panel, [*labels[:1], *notes, *labels[1:], *measured], [*roofs, line])


def _curves(found: Roofline) -> tuple[_Curve, _Curve]:
    ours = [(point.k, point.intensity, point.tokens_per_s) for point in found.points]
    paper = [
        (point.k, point.paper_intensity, point.paper_tokens_per_s)
        for point in found.points
        if point.paper_tokens_per_s > 0.0
    ]
    return (
        _Curve("Ours: Θ(k) = committed / (draft + verify + waits)", _OURS, found.best_k, ours),
        _Curve("The paper: Θ(k) = accepted / (draft + all late I/O + verify)", _PAPER, found.paper_k, paper),
    )


def _caption(found: Roofline, stop: EarlyStop) -> str:
    by_k = {point.k: point for point in found.points}
    best, plain, paper = by_k[found.best_k], by_k[0], by_k[found.paper_k]
    return (
        f"We choose k = {found.best_k}: {best.tokens_per_s:.3g} tok/s, without a draft {plain.tokens_per_s:.3g}. The "
        f"paper's formula chooses {found.paper_k}, where {paper.tokens_per_s:.3g} are reached: it counts no recovered "
        f"or bonus token and hides none of the link behind the verify. The recorded run committed most tokens at "
        f"k = {found.recorded_k}. Ending drafts early where their tokens are doubtful would change tokens a second by "
        f"{stop.gain:+.1%}. Depths are replayed; grey: nothing is waited for."
    )


def _set_axes(panel: Axes, found: Roofline, points: Sequence[tuple[int, float, float]]) -> float:
    """Limits of both panels; returns where depths stand that wait for nothing."""
    ridge = found.compute_roof / found.io_roof if found.io_roof else 1.0
    intensities = [intensity for _, intensity, _ in points] + [point.intensity for point in found.measured]
    finite = [value for value in intensities if 0.0 < value < math.inf] + [ridge]
    heights = [height for _, _, height in points] + [point.tokens_per_s for point in found.measured]
    left, right = min(finite) / _MARGIN, max(finite) * _MARGIN**4
    panel.set(xscale="log", yscale="log", xlim=(left, right))
    panel.set_ylim(min(heights) / _MARGIN, found.compute_roof * _MARGIN)
    _number_plainly(panel)
    return right / _MARGIN**2


def _draw_roofs(panel: Axes, found: Roofline) -> tuple[list[Line], list[Label]]:
    """Their lines, and what to write beside them."""
    (left, right), (bottom, top) = panel.get_xlim(), panel.get_ylim()
    level, slope = found.compute_roof, found.io_roof
    ridge = level / slope if slope else left
    lines = [[(left, level), (right, level)]]
    begin = ridge if left < ridge < (left * right) ** 0.5 else left
    notes = [Label("roof: no waits", begin, level, color=_ROOF)]
    if slope:
        low, high = max(left, bottom / slope), min(right, top / slope)
        lines.append([(low, low * slope), (high, high * slope)])
        rate = found.link_bytes_per_s
        link = f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
        notes.append(Label(f"roof: the link, {link}", low, low * slope, color=_ROOF))
    for line in lines:
        panel.plot([x for x, _ in line], [y for _, y in line], color=_ROOF, linewidth=1.2)
    return lines, notes


def _draw_curve(panel: Axes, curve: _Curve, edge: float) -> tuple[Line, list[Label]]:
    """Its line, and what to write, the chosen depth first."""
    placed = [(k, min(intensity, edge), height) for k, intensity, height in curve.points]
    panel.plot([x for _, x, _ in placed], [y for _, _, y in placed], "o-", color=curve.color, markersize=4)
    labels = []
    for k, x, y in placed:
        is_best = k == curve.best_k
        if is_best:
            panel.plot([x], [y], "o", color=curve.color, markersize=10, markeredgecolor="white", zorder=4)
        size, weight = (11.0, "bold") if is_best else (7.0, "normal")
        labels.append(Label(f"k = {k}" if is_best or k == placed[0][0] else str(k), x, y, size, curve.color, weight))
    return [(x, y) for _, x, y in placed], sorted(labels, key=lambda label: -label.size)


def _draw_measured(panel: Axes, found: Roofline, edge: float) -> list[Label]:
    labels = []
    for point in found.measured:
        x, y = min(point.intensity, edge), point.tokens_per_s
        panel.plot([x], [y], "X", color=_MEASURED, markersize=6, markeredgecolor="white", zorder=5)
        labels.append(Label(f"recorded at k = {point.k}", x, y, color=_MEASURED))
    return labels


def _number_plainly(panel: Axes) -> None:
    """1, 2, 5, 10, ... or 1, 10, 100, ... in place of powers of ten."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
        is_wide = high / low > _MANY_NUMBERS
        axis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())
