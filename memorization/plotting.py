"""One visual style for every figure: colors that survive color-blindness, opaque paper, readable on a phone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito (2008), whose members stay apart under every common color-vision deficiency.
COLORS = {
    "pure": "#0072B2",  # blue: pure DP, and the first series of any figure
    "approximate": "#D55E00",  # vermilion: approximate DP, the second series
    "gaussian": "#009E73",  # green: Gaussian DP, the third series
    "naive": "#999999",  # grey: bounds that are not attained, baselines, chance
    "paper": "#000000",  # black: the paper's own numbers
    "measured": "#E69F00",  # orange: what an experiment measured
    "extra": "#CC79A7",  # purple
    "light": "#56B4E9",  # sky blue
}

_STYLE = {
    "figure.facecolor": "white",  # opaque, so that dark pages do not swallow the axes
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "figure.dpi": 110,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": "medium",
    "font.size": 10.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}


@contextmanager
def figure(columns: int = 1, rows: int = 1, width: float = 6.4, height: float = 4.0) -> Iterator[tuple[Figure, object]]:
    """Open a figure in the book's style, as `with figure(2) as (fig, axes)`; yields what `plt.subplots` returns.

    Args:
        columns: number of panels side by side.
        rows: number of panels on top of each other.
        width: total width in inches.
        height: total height in inches.
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        drawn = plt.subplots(rows, columns, figsize=(width, height))
        interactive = plt.isinteractive()  # a notebook's backend, loaded by the first figure, has switched it on
        yield drawn
    plt.interactive(interactive)  # the context has put it back to what it was, and later figures would stay invisible


def paper_points(axes: Axes, x: object, y: object, label: str = "paper", **style: object) -> None:
    """Draw the paper's printed numbers as hollow black diamonds, the same in every figure."""
    look = {"marker": "D", "mfc": "none", "mec": COLORS["paper"], "ls": "none", "ms": 7, "zorder": 2.5}
    axes.plot(x, y, label=label, **{**look, **style})
