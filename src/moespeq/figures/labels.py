"""Where to write beside points so that nothing lies on anything else: the first free of a few places around each.

Greedy, in the order given, so what matters most comes first; a label that finds no place is left out. Widths are
estimated from the number of characters, in points (1/72 inch), which needs no renderer and differs by no machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import dist
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Box", "Label", "free_places", "write_labels"]

_CHAR_WIDTH, _HEIGHT = 0.62, 1.15  # of the font's size
_MARK, _LINE = 3.0, 1.0  # half the width of a point's mark, and of a line, in points
_DISTANCE = 6.0  # from a point to the nearer edge of its label


class Box(NamedTuple):
    """In points, from the lower left corner of the figure."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        """Whether they share any area."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )


@dataclass(frozen=True, slots=True)
class Label:
    """What is written beside the point (x, y), in the units of the axes."""

    text: str
    x: float
    y: float
    size: float = 7.0
    color: str = "#333333"
    weight: str = "normal"


def free_places(
    labels: Sequence[tuple[float, float, float, float]], frame: Box, taken: Sequence[Box]
) -> list[Box | None]:
    """For each (x, y, width, height), its point and its own size, a box inside `frame` that meets nothing before it."""
    used, places = list(taken), []
    for x, y, width, height in labels:
        around = (
            Box(x + dx, y + dy, x + dx + width, y + dy + height)
            for distance in (_DISTANCE, 2 * _DISTANCE, 3 * _DISTANCE)
            for dx, dy in _offsets(width, height, distance)
        )
        place = next((box for box in around if _is_inside(box, frame) and not any(map(box.meets, used))), None)
        used += [] if place is None else [place]
        places.append(place)
    return places


def write_labels(panel: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]] = ()) -> None:
    """Write on `panel`, whose limits and size are final; points of all labels, and lines, are kept free."""
    figure = panel.get_figure(root=True)
    assert figure is not None
    to_points = 72 / figure.dpi

    def in_points(x: float, y: float) -> tuple[float, float]:
        pixels = panel.transData.transform((x, y))
        return to_points * float(pixels[0]), to_points * float(pixels[1])

    points = [in_points(label.x, label.y) for label in labels]
    marks = [_around(point, _MARK) for point in points]
    for line in lines:
        for begin, end in pairwise(in_points(x, y) for x, y in line):
            marks += _along(begin, end)
    sized = [
        (x, y, _CHAR_WIDTH * label.size * len(label.text), _HEIGHT * label.size)
        for label, (x, y) in zip(labels, points, strict=True)
    ]
    frame = Box(*(to_points * edge for edge in panel.bbox.extents))
    for label, (x, y), place in zip(labels, points, free_places(sized, frame, marks), strict=True):
        if place is not None:
            offset = ((place.left + place.right) / 2 - x, (place.bottom + place.top) / 2 - y)
            style: dict[str, Any] = {"fontsize": label.size, "color": label.color, "fontweight": label.weight}
            panel.annotate(
                label.text, (label.x, label.y), offset, textcoords="offset points", ha="center", va="center", **style
            )


def _offsets(width: float, height: float, distance: float) -> Iterator[tuple[float, float]]:
    """From a point to the lower left corner of its label: above and below, beside, then the corners."""
    middle, left, right = -width / 2, -distance - width, distance
    above, below = distance, -distance - height
    yield from ((middle, above), (middle, below), (right, -height / 2), (left, -height / 2))
    yield from ((right, above), (left, above), (right, below), (left, below))


def _around(point: tuple[float, float], distance: float) -> Box:
    x, y = point
    return Box(x - distance, y - distance, x + distance, y + distance)


def _along(begin: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Small boxes that cover a straight line."""
    num_steps = max(1, int(dist(begin, end) / _LINE))
    step = ((end[0] - begin[0]) / num_steps, (end[1] - begin[1]) / num_steps)
    return [_around((begin[0] + count * step[0], begin[1] + count * step[1]), _LINE) for count in range(num_steps + 1)]


def _is_inside(box: Box, frame: Box) -> bool:
    return frame.left <= box.left and box.right <= frame.right and frame.bottom <= box.bottom and box.top <= frame.top
