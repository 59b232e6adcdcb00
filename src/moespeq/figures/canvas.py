"""The sheet that every figure is drawn on: one look, and equal values give equal files (no date, no random ids)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from moespeq.errors import UsageError
from moespeq.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["require_matplotlib", "sheet"]

_INK, _FAINT = "#333333", "#dddddd"
_TITLE_CHARS_PER_INCH, _CAPTION_CHARS_PER_INCH = 10, 16
_LOOK: Any = {
    "svg.hashsalt": "moespeq",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}


def require_matplotlib() -> None:
    """Raise UsageError where it is not installed, before anything is computed for a figure."""
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise UsageError("Figures need matplotlib, which is missing; `pip install matplotlib` adds it.") from error


@contextmanager
def sheet(path: Path, *, title: str, caption: str, width_in: float = 6.4, height_in: float = 3.6) -> Iterator[Figure]:
    """A figure to draw on while the block lasts; then it is written to `path`, in the format of its suffix."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        heading, below = fill(title, int(width_in * _TITLE_CHARS_PER_INCH)), int(width_in * _CAPTION_CHARS_PER_INCH)
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(fill(caption, below), x=0.01, ha="left", fontsize=8)
        yield figure
        drawn, suffix = BytesIO(), path.suffix
        figure.savefig(drawn, format=suffix[1:], dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
        write_whole(path, drawn.getvalue())
