"""Numbers by round as a picture; matplotlib is imported only to draw one."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ray_fed.observability import figures


def plot_curves(curves: Mapping[str, Sequence[float | None]]) -> Any:
    """Return a matplotlib figure with one panel a curve, rounds counted from 1.

    Args:
        curves: a value for each round, None where there is none, by the name of what
            it measures; at least one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib.ticker

    figure = figures.new_figure(4.5 * len(curves), 3.5)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for index, (name, values) in enumerate(curves.items()):
        panel = panels[index]
        points = [(n + 1, v) for n, v in enumerate(values) if v is not None]
        rounds, found = zip(*points, strict=True) if points else ((), ())
        panel.plot(rounds, found, color=f"C{index}", marker=".")
        panel.set(xlabel="round", ylabel=name)
        panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    return figure


def draw_curves(
    path: str | os.PathLike[str], curves: Mapping[str, Sequence[float]]
) -> None:
    """Write the picture of `plot_curves` to a file.

    Args:
        path: of the picture; its suffix says the format.
        curves: as for `plot_curves`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plot_curves(curves).savefig(path, dpi=150)
