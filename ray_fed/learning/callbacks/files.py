"""Callbacks that write files: tables, lines, models.

Files of callbacks that are there whole or not at all.

Rounds as lines of a file: CSV and JSON lines.

A file is written anew from the history as a run begins or is resumed, so that a row is
there once, also after a kill between a row and a saved state.

The best model of a run as a Keras file.
"""

import contextlib
import csv
import io
import json
import math
import os
import pathlib
import uuid
from collections.abc import Generator, Sequence
from typing import Any, Literal

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files.opening import expand_home
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.history import History, RoundRecord, is_rising, row_of
from ray_fed.learning.models import Model
from ray_fed.observability import reprs


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Generator[pathlib.Path]:
    """Yield a path to write to; what is there at the end becomes the file.

    Args:
        path: of the file; its folder is made.

    Raises:
        StorageError: the file cannot be written.
    """
    name = f".{path.stem}.{uuid.uuid4().hex}{path.suffix}"
    temporary = path.with_name(name)
    with telling(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def telling(path: pathlib.Path) -> Generator[None]:
    """Raise StorageError, with the name of the file, where it cannot be written."""
    try:
        yield
    except OSError as error:
        # The text of the error may name the temporary file.
        cause = f" ({error.strerror})" if error.strerror else ""
        raise errors.StorageError(
            f"Expected to write the file `{path}`, found {type(error).__name__}{cause}:"
            " make room for it, or name another one."
        ) from error


def check_place(path: pathlib.Path) -> None:
    """Raise unless a file can be written; one that is there is left alone.

    Raises:
        StorageError: it cannot.
    """
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "a folder has that name")
        temporary.touch()
        temporary.unlink()


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


class ModelCheckpoint(Callback):
    """Saves the model of the best round so far, as a `.keras` file.

    Args:
        path: of the file; replaced by each better model, never half-written.
        model: that is trained.
        metric: as `History.values` takes it; the best round has the best value.
        mode: as for `EarlyStopping`.

    Raises:
        ConfigError: the path has another suffix, or the mode is none.
        ValueMismatchError: as a run begins: as `Model.to_keras` says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Model,
        metric: str = "loss",
        mode: Literal["auto", "min", "max"] = "auto",
    ) -> None:
        self._path = pathlib.Path(expand_home(path))
        if self._path.suffix != ".keras":
            raise errors.ConfigError(
                f"Expected a name that ends with .keras, found `{self._path}`."
            )
        self._model = model
        self.metric = metric
        self._is_rising = is_rising(metric, mode)
        self._history = History()

    @override
    def __repr__(self) -> str:
        path = reprs.shorten(str(self._path))
        return f"ModelCheckpoint({path!r}, metric={self.metric!r})"

    @override
    def on_start(self, history: History) -> None:
        check_place(self._path)
        # A layer that cannot be made again is told before the run, not after a round.
        self._model.to_keras(self._model.initial_weights())
        self._history = history

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._history = self._history.with_round(record)

    @override
    def needs_state(self, record: RoundRecord) -> bool:
        *before, now = self._history.values(self.metric)
        if now is None or now != now:  # noqa: PLR0124 (a loss over no examples is NaN)
            return False
        known = [value for value in before if value is not None]
        if self._is_rising:
            return all(now > value or value != value for value in known)  # noqa: PLR0124
        return all(now < value or value != value for value in known)  # noqa: PLR0124

    @override
    def on_state(self, record: RoundRecord, state: Any) -> None:
        with replacing(self._path) as temporary:
            self._model.to_keras(state).save(temporary)
