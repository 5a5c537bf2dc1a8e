"""Short texts and small HTML tables that show objects in terminals and notebooks."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_CHARACTERS = 120
_LEAST_LONG = 999.95
"""Smallest number that has four digits before the point after rounding."""
_MOST_WHOLE = 1e15


def shorten(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text as one line that is cut to at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def show_number(value: float) -> str:
    """Return a number with four significant digits: "0.2041", "1.235e-06".

    Whole numbers, and numbers from 1,000 on, have all digits before the point.
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


class Html(str):
    """A cell of a table that contains HTML. Other text is escaped."""


def draw_table(
    caption: str,
    rows: Sequence[Mapping[str, object]],
    below: str = "",
    *,
    has_heads: bool = True,
) -> str:
    """Return a table as HTML without scripts or style sheets. A wide table scrolls.

    Args:
        caption: The text above the table.
        rows: The cells of each row by column: numbers, text, or None if empty.
        below: HTML that follows the table.
        has_heads: Whether the names of the columns are shown.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    texts = {name for row in rows for name in row if isinstance(row[name], str)}
    # A name may continue on a second line after its first word.
    heads = {n: Html(html.escape(n).replace(".", ".<wbr>", 1)) for n in names}

    def draw(tag: str, row: Mapping[str, object]) -> str:
        cells = (
            f"<{tag}{_LEFT * (name in texts)}>{_draw_cell(row.get(name))}</{tag}>"
            for name in names
        )
        return f"<tr>{''.join(cells)}</tr>"

    head = f"<thead>{draw('th', heads)}</thead>" if has_heads and names else ""
    body = "".join(draw("td", row) for row in rows)
    return (
        "<div style='overflow-x:auto;max-width:100%'><table>"
        "<caption style='white-space:nowrap;text-align:left'>"
        f"{html.escape(caption)}</caption>{head}"
        f"<tbody>{body}</tbody></table>{below}</div>"
    )


_LEFT = " style='text-align:left'"


def _draw_cell(value: object) -> str:
    return value if isinstance(value, Html) else html.escape(_show(value))


def draw_facts(caption: str, facts: Mapping[str, Any]) -> str:
    """Return HTML of a table with one row per fact."""
    rows = [{"name": name, "fact": _show(value)} for name, value in facts.items()]
    return draw_table(caption, rows, has_heads=False)


def _show(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return show_number(value)
