"""Short text and small tables of objects, for a terminal and a notebook."""

import html
from collections.abc import Mapping
from typing import Any

_MOST_CHARACTERS = 120


def shorten(text: str) -> str:
    """Return a text of one line that fits into one."""
    line = " ".join(text.split())
    if len(line) <= _MOST_CHARACTERS:
        return line
    return line[: _MOST_CHARACTERS - 1] + "…"


def draw_facts(caption: str, facts: Mapping[str, Any]) -> str:
    """Return HTML, without scripts or style sheets: a row a fact."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(name)}</td>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return (
        f"<table><caption style='white-space:nowrap;text-align:left'>"
        f"{html.escape(caption)}</caption><tbody>{rows}</tbody></table>"
    )
