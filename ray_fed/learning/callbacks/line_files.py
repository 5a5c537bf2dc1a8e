"""Rounds as lines of a file: CSV and JSON lines.

A file is written anew from the history as a run begins or is resumed, so that a row is
there once, also after a kill between a row and a saved state.
"""

import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ray_fed.files.opening import expand_home
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.callbacks.whole_files import replacing, telling
from ray_fed.learning.history import History, RoundRecord, row_of
from ray_fed.observability import reprs


class CSV(Callback):
    """Writes a row a round to a CSV file.

    The columns are those of `History.rows()`. A metric that is new in a later round,
    such as the first evaluation, has the file written anew with its column.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(expand_home(path))
        self._records: list[RoundRecord] = []
        self._columns: list[str] = []

    @override
    def __repr__(self) -> str:
        return f"CSV({reprs.shorten(str(self._path))!r})"

    @override
    def on_start(self, history: History) -> None:
        self._records = list(history)
        self._write()

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._records.append(record)
        row = row_of(record)
        if not row.keys() <= set(self._columns):
            self._write()
            return
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerow(row)
        _append(self._path, text.getvalue())

    def _write(self) -> None:
        rows = [row_of(record) for record in self._records]
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        if self._columns:
            writer = csv.DictWriter(text, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        _replace(self._path, text.getvalue())


class JSONLines(Callback):
    """Writes a JSON object a round, on a line of its own.

    The names are those of `History.rows()`. A number that is not finite, such as a loss
    over no examples, is null: JSON has no such numbers.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(expand_home(path))

    @override
    def __repr__(self) -> str:
        return f"JSONLines({reprs.shorten(str(self._path))!r})"

    @override
    def on_start(self, history: History) -> None:
        _replace(self._path, "".join(_lines(history)))

    @override
    def on_round(self, record: RoundRecord) -> None:
        _append(self._path, "".join(_lines([record])))


def _lines(records: Sequence[RoundRecord]) -> list[str]:
    rows = ({k: _finite(v) for k, v in row_of(r).items()} for r in records)
    return [json.dumps(row, allow_nan=False) + "\n" for row in rows]


def _finite(value: Any) -> Any:
    return value if math.isfinite(value) else None


def _append(path: pathlib.Path, text: str) -> None:
    with telling(path), path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def _replace(path: pathlib.Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
