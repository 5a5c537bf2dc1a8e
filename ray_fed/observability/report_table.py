"""Draws a round for a notebook: a row for each subround, and a bar for when it ran."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_fed.observability import reprs

_HEADINGS = (
    "subround",
    "clients",
    "attempts",
    "seconds",
    "when",
    "worker",
    "pid",
    "node",
)
_NUMBERS = frozenset({"subround", "clients", "attempts", "seconds", "pid"})
_BAR_PX = 160
_BAR_COLOR = "#4c78a8"
_RETRIED_COLOR = "#e45756"


def draw_subrounds(
    caption: str,
    rows: Sequence[Mapping[str, Any]],
    remarks: Iterable[str],
    seconds: float,
) -> str:
    """Return HTML without scripts or style sheets.

    Args:
        caption: above the table.
        rows: by name of its columns; `started_s` and `seconds` make the bar, in red
            where there was more than one attempt.
        remarks: below the table, a line each.
        seconds: of the whole round: the width of the column of bars.
    """
    head = "".join(f"<th{_align(name)}>{name}</th>" for name in _HEADINGS)
    body = "".join(f"<tr>{_draw_row(row, seconds)}</tr>" for row in rows)
    notes = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    return reprs.draw_table(
        caption,
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>",
        f"<ul>{notes}</ul>" if notes else "",
    )


def _align(name: str) -> str:
    side = "right" if name in _NUMBERS else "left"
    return f" style='text-align:{side};padding:2px 8px'"


def _draw_row(row: Mapping[str, Any], seconds: float) -> str:
    return "".join(
        f"<td{_align(name)}>{_draw_cell(name, row, seconds)}</td>" for name in _HEADINGS
    )


def _draw_cell(name: str, row: Mapping[str, Any], seconds: float) -> str:
    if name == "when":
        scale = _BAR_PX / seconds if seconds > 0 else 0.0
        left = min(_BAR_PX - 1.0, row["started_s"] * scale)
        width = min(_BAR_PX - left, max(1.0, row["seconds"] * scale))
        color = _BAR_COLOR if row["attempts"] == 1 else _RETRIED_COLOR
        return (
            f"<div style='width:{_BAR_PX}px'><div style='margin-left:{left:.0f}px;"
            f"width:{width:.0f}px;height:10px;background:{color}'></div></div>"
        )
    if name == "seconds":
        return reprs.show_number(row["seconds"])
    return html.escape(str(row[name]))
