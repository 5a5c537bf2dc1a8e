"""A history in a notebook: a table of rounds."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ray_fed.observability import reprs


def draw_rounds(rows: Sequence[Mapping[str, Any]], num_rounds: int) -> str:
    """Return HTML of a table.

    Args:
        rows: of the last rounds, as `History.rows` returns them.
        num_rounds: of all.
    """
    shown = [shown_row(row) for row in rows]
    names = list(dict.fromkeys(name for row in shown for name in row))
    names.sort(key=_is_cost)  # numbers first: a page may be narrow
    head = "".join(f"<th>{_break(html.escape(name))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_show(row.get(name))}</td>" for name in names)
        for row in shown
    )
    above = f", the last {len(rows)} of them" if num_rounds > len(rows) else ""
    return reprs.draw_table(
        f"{num_rounds} rounds{above}",
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>",
    )


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round as a notebook shows it: bytes by the million."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        way = name.removeprefix("bytes_")
        shown |= {name: value} if way == name else {f"MB {way}": value / 1e6}
    return shown


def _is_cost(name: str) -> bool:
    return name != "round" and not name.startswith(("training.", "evaluation."))


def _break(name: str) -> str:
    """Return a heading that may go on in a second line, behind its first word."""
    return name.replace(".", ".<wbr>", 1)


def _show(value: float | None) -> str:
    return "" if value is None else reprs.show_number(value)
