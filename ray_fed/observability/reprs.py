"""Short text and small tables of objects, for a terminal and a notebook."""

import html
from collections.abc import Mapping
from typing import Any

_MOST_CHARACTERS = 120
_LEAST_LONG = 999.95
"""Rounded, numbers from here on have four digits before the point."""
_MOST_WHOLE = 1e15


def shorten(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text as one line of so many characters at most."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def show_number(value: float) -> str:
    """Return a number with four digits that matter: "0.2041", "1.235e-06".

    Whole numbers, and others from 1,000 on, have all that are before the point.
    """
    size = abs(value)
    is_short = size < _LEAST_LONG and not float(value).is_integer()
    return f"{value:#.4g}" if is_short or size >= _MOST_WHOLE else f"{value:,.0f}"


def show_bytes(count: int) -> str:
    """Return a size: "40 bytes", "2.600 kB", "12.35 MB"."""
    if count < 1000:  # noqa: PLR2004 (a kB)
        return f"{count} bytes"
    size, unit = (count / 1e3, "kB") if count < 1e6 else (count / 1e6, "MB")  # noqa: PLR2004
    return f"{show_number(size)} {unit}"


def draw_table(caption: str, body: str, below: str = "") -> str:
    """Return HTML, without scripts or style sheets, that scrolls where it is wide.

    Args:
        caption: above the table, as text.
        body: the rows, as HTML.
        below: what follows the table, as HTML.
    """
    return (
        "<div style='overflow-x:auto;max-width:100%'><table>"
        "<caption style='white-space:nowrap;text-align:left'>"
        f"{html.escape(caption)}</caption>{body}</table>{below}</div>"
    )


def draw_facts(caption: str, facts: Mapping[str, Any]) -> str:
    """Return HTML, without scripts or style sheets: one row per fact."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(name)}</td>"
        f"<td style='text-align:left'>{html.escape(_show(value))}</td></tr>"
        for name, value in facts.items()
    )
    return draw_table(caption, f"<tbody>{rows}</tbody>")


def _show(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return show_number(value)
