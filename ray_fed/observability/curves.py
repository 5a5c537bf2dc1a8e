"""Numbers by round as a picture; matplotlib is imported only to draw one."""

import os
from collections.abc import Mapping, Sequence


def draw_curves(
    path: str | os.PathLike[str], curves: Mapping[str, Sequence[float]]
) -> None:
    """Write a picture with one panel a curve, rounds counted from 1.

    Args:
        path: of the picture; its suffix says the format.
        curves: a value for each round, by the name of what it measures; at least one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib.figure
    import matplotlib.ticker

    figure = matplotlib.figure.Figure(
        figsize=(4.5 * len(curves), 3.5), layout="constrained"
    )
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for index, (name, values) in enumerate(curves.items()):
        panel = panels[index]
        rounds = range(1, len(values) + 1)
        panel.plot(rounds, values, color=f"C{index}", marker=".")
        panel.set(xlabel="round", ylabel=name)
        panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
