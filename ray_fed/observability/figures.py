"""Figures of matplotlib that show themselves in a notebook, with no set-up there."""

import io
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure.

    Args:
        width: in inches.
        height: in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib.figure

    class ShownFigure(matplotlib.figure.Figure):
        """A figure that a notebook shows also where pyplot was not imported."""

        def _repr_png_(self) -> bytes:
            drawn = io.BytesIO()
            self.savefig(drawn, format="png", dpi=100)
            return drawn.getvalue()

    return ShownFigure(figsize=(width, height), layout="constrained")
