"""What a run did, a row a round: as a sequence, a table, a picture.

Metrics as a history keeps them: the same types before a run is saved and after.

A history in a notebook: a table of rounds.

When a run ends before its last round: functions of its history.
"""

import dataclasses
import json
import math
import numbers
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, overload

import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport]  # numpy learns bfloat16
import numpy as np
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.observability.timeline as timeline
import ray_fed.tracebacks as tracebacks
from ray_fed.imports import import_extra
from ray_fed.learning.checks import read_whole
from ray_fed.observability import reprs
from ray_fed.program.checkpoint_store import Decoder, Encoder, Versions

NUMBERS = "biufV"
"""Kinds of numpy's dtypes that are numbers; bfloat16 is of kind `V`."""

MOST_ELEMENTS = 100
"""Elements of an array that have names of their own; a larger one has none."""


def read_evaluation(found: Any) -> dict[str, Any]:
    """Return what `evaluate` returned, as `read_metrics` does.

    Raises:
        ValueMismatchError: it has no names, or a value is of a kind that is not kept.
    """
    if not isinstance(found, Mapping) and not hasattr(found, "_asdict"):
        raise errors.ValueMismatchError(
            "Expected metrics by name from `evaluate`, found"
            f" {errors.describe(found)} of type `{type(found).__name__}`: return a"
            ' mapping, such as {"loss": 0.5}, or what `learning.spread` makes of the'
            " metrics of each client."
        )
    return read_metrics(found, "evaluation")


def read_metrics(found: Any, label: str) -> Any:
    """Return metrics as plain values.

    Mappings and named tuples become dicts. Tensors, and references to values, become
    arrays of numpy, or its numbers where they have no dimension.

    Args:
        found: numbers, text, bytes, arrays, tensors, or mappings, lists and tuples of
            these.
        label: what it is, for the error.

    Raises:
        ValueMismatchError: a value is of another kind.
    """
    if found is None or type(found) in (bool, int, float, str, bytes):
        return found
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, Mapping):
        pairs = cast("Mapping[Any, Any]", found).items()
        return {str(k): read_metrics(v, f"{label}.{k}") for k, v in pairs}
    if isinstance(found, list | tuple):
        kind = list if isinstance(found, list) else tuple
        members = cast("list[Any] | tuple[Any, ...]", found)
        return kind(read_metrics(member, label) for member in members)
    if not hasattr(found, "__array__"):
        raise errors.ValueMismatchError(
            "Expected numbers, text, bytes, arrays, tensors, or mappings, lists and"
            f" tuples of these as metrics, found a `{type(found).__name__}` as"
            f" `{label}`: convert it to one of these."
        )
    return _read_array(found, label)


def _read_array(found: Any, label: str) -> Any:
    if isinstance(found, np.generic | np.ndarray):
        array: Any = found
    else:
        try:
            array = np.asarray(found)
        except Exception as error:
            raise errors.ValueMismatchError(
                f"Expected a tensor that numpy can read as `{label}`, found a"
                f" `{type(found).__name__}` ({error}): convert it to an array or a"
                " number."
            ) from error
        array = array if array.ndim else array[()]
    if is_number_type(array.dtype):
        return array
    return read_metrics(array.tolist(), label)


def is_number_type(dtype: np.dtype[Any]) -> bool:
    """Return whether the elements of arrays of a dtype are numbers."""
    return dtype.kind in NUMBERS and not dtype.names


def flatten_numbers(metrics: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield numbers with their names: `loss`, and `f1/0`, `f1/1` of several in one."""
    if hasattr(metrics, "_asdict"):
        metrics = metrics._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(metrics, list | tuple):
        metrics = dict(enumerate(cast("Sequence[Any]", metrics)))
    if isinstance(metrics, Mapping):
        for name, value in cast("Mapping[Any, Any]", metrics).items():
            yield from flatten_numbers(value, f"{path}/{name}" if path else str(name))
    elif isinstance(metrics, bool | int | float | np.generic | np.ndarray):
        array = np.asarray(metrics)
        if is_number_type(array.dtype):
            names = name_elements(path, array.shape)
            yield from zip(names, map(float, array.flat), strict=False)


def name_elements(path: str, shape: Sequence[int]) -> list[str]:
    """Return the names of an array's elements: its own, if it has one; none of many."""
    size = math.prod(shape)
    if size == 1:
        return [path]
    if size > MOST_ELEMENTS:
        return []
    return ["/".join([path, *map(str, index)]) for index in np.ndindex(*shape)]


def is_same(one: Any, other: Any) -> bool:
    """Return whether plain values are equal; NaN equals NaN."""
    match one, other:
        case dict(), dict():
            mine, its = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
            return mine.keys() == its.keys() and all(
                is_same(value, its[name]) for name, value in mine.items()
            )
        case (list(), list()) | (tuple(), tuple()):
            members, found = cast("list[Any]", one), cast("list[Any]", other)
            return len(members) == len(found) and all(map(is_same, members, found))
        case (float() | np.generic() | np.ndarray(), _):
            equal = (one == other) | ((one != one) & (other != other))  # noqa: PLR0124
            return np.shape(one) == np.shape(other) and bool(np.all(equal))
        case _:
            return one == other


def _shown_row(record: "RoundRecord") -> dict[str, Any]:
    """Return a round as a notebook shows it: bytes by the million."""
    shown: dict[str, Any] = {}
    for name, value in row_of(record).items():
        way = name.removeprefix("bytes_")
        shown |= {name: value} if way == name else {f"MB {way}": value / 1e6}
    return shown


def _is_cost(name: str) -> bool:
    return name != "round" and not name.startswith(("training.", "evaluation."))


_SHOWN_ROWS = 20
_SHOWN_NUMBERS = 12
_TRAINING, _EVALUATION = "training.", "evaluation."


@dataclasses.dataclass(frozen=True, repr=False)
class RoundRecord:
    """What one round was and did.

    Attributes:
        round_index: rounds of the run before this one.
        clients: of its cohort, by index, in order.
        training: metrics of the clients' training.
        evaluation: what `evaluate` returned after the round, as plain values; None
            where it was not due.
        seconds: from the call of the round to its metrics, without evaluation.
        retries: attempts of its subrounds beyond the first of each.
        dropped: clients of the cohort that the round went on without, by index.
        bytes_sent: of the state and of clients' values, as its report counts them.
        bytes_returned: of what came back to the coordinator of the round, likewise.
        bytes_read: of states that came into this process since the record before: to be
            saved, or for a callback.
        started_at: when the round was called, in seconds since 1970.
        spans: what each worker did when, as tuples of the fields of
            `observability.timeline.Span`.
    """

    round_index: int
    clients: tuple[int, ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    seconds: float
    retries: int = 0
    dropped: tuple[int, ...] = ()
    bytes_sent: int = 0
    bytes_returned: int = 0
    bytes_read: int = 0
    started_at: float = 0.0
    spans: tuple[tuple[Any, ...], ...] = ()

    @property
    def round(self) -> int:
        """The number of the round, from 1: what tables, plots and files call it."""
        return self.round_index + 1

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoundRecord):
            return NotImplemented
        return is_same(vars(self), vars(other))

    @override
    def __hash__(self) -> int:
        return hash((self.round_index, self.clients))

    @override
    def __repr__(self) -> str:
        cost = f"{len(self.clients)} clients, {reprs.show_number(self.seconds)} s"
        return f"<round {self.round}: {cost}, {_show_numbers(self)}>"

    def _repr_html_(self) -> str:
        return reprs.draw_facts(f"round {self.round}", _shown_row(self))

    def numbers(self) -> dict[str, float]:
        """Return the numbers of metrics by name: `training.loss`.

        Of several in one metric each has a name of its own, `evaluation.f1_score/0`;
        of arrays with more than 100 elements none has.
        """
        parts = {_TRAINING: self.training, _EVALUATION: self.evaluation or {}}
        return {
            prefix + name: number
            for prefix, metrics in parts.items()
            for name, number in flatten_numbers(metrics)
        }

    def timeline(self) -> Any:
        """Return a matplotlib figure: a lane a worker, a bar a subround.

        Raises:
            UserError: matplotlib is not installed.
        """
        spans = [timeline.Span(*span) for span in self.spans]
        return timeline.draw_spans(spans, f"round {self.round} of the run")


def to_json(record: RoundRecord) -> bytes:
    """Return a record as a saved run has it."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return json.dumps(Encoder().describe(fields, f"round {record.round}")).encode()


def from_json(content: bytes, where: str) -> list[RoundRecord]:
    """Return the records of a list that `to_json` described.

    Raises:
        StateFormatError: another version of ray_fed wrote them.
    """
    described = json.loads(content)
    if not all("kind" in each for each in described):
        raise errors.StateFormatError(
            f"Expected the rounds of a run in `{where}` as this version of ray_fed"
            " saves them, found those of an earlier one: read them with the version"
            " that wrote them."
        )
    return [RoundRecord(**Decoder().decode(each)) for each in described]


_PANELS_A_ROW = 4  # of a plot: a notebook is about as wide


class History(Sequence[RoundRecord]):
    """The rounds of a run, in order; equal to one of equal rounds.

    Args:
        records: one a round, from the first one on.
        evaluates: whether the run has an `evaluate`: a metric's bare name is that of
            evaluation then.
    """

    def __init__(
        self, records: Iterable[RoundRecord] = (), *, evaluates: bool = False
    ) -> None:
        self._records = tuple(records)
        self._evaluates = evaluates

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    @override
    def __getitem__(self, index: int | slice) -> "RoundRecord | History":
        if isinstance(index, slice):
            return History(self._records[index], evaluates=self._evaluates)
        return self._records[index]

    @override
    def __len__(self) -> int:
        return len(self._records)

    @classmethod
    @tracebacks.shorten
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Return the rounds of a run that was saved, from its `storage_path` alone.

        Args:
            path: of the run, or its URI; nothing is written there.

        Raises:
            ConfigError: no round of a run is saved there.
            StorageError: it cannot be read.
            StateFormatError: another version of ray_fed wrote what is saved.
            SavedStateError: all that is saved is damaged.
        """
        versions = Versions(path, "round_")
        values, version = versions.read_latest()
        if values is None:
            raise errors.ConfigError(
                f"Expected the rounds of a run in `{os.fspath(path)}`, found none: pass"
                " its `storage_path`."
            )
        records = from_json(values["history"], versions.where(version))
        evaluates = any(record.evaluation is not None for record in records)
        return cls(records, evaluates=evaluates)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self._records == other._records

    @override
    def __hash__(self) -> int:
        return hash(tuple(record.round_index for record in self))

    def with_round(self, record: RoundRecord) -> "History":
        """Return this history and one more round."""
        return History((*self._records, record), evaluates=self._evaluates)

    @override
    def __repr__(self) -> str:
        last = f": {_show_numbers(self[-1])}" if self else ""
        return f"<history of {len(self)} rounds{last}>"

    def names(self) -> list[str]:
        """Return the names of all numbers, such as `training.loss`, in order."""
        found = (name for record in self for name in record.numbers())
        return list(dict.fromkeys(found))

    @tracebacks.shorten
    def values(self, metric: str) -> list[float | None]:
        """Return a metric by round; None where a round has none.

        Args:
            metric: one of `names()`; or its bare name, as `loss`: that of evaluation in
                a run that evaluates, else that of training.

        Raises:
            ConfigError: it is no name, or rounds have metrics, but not this one.
        """
        _expect_name(metric)
        name = self._full_name(metric)
        return [record.numbers().get(name) for record in self]

    def _full_name(self, metric: str) -> str:
        names = self.names()
        evaluated = any(record.evaluation is not None for record in self)
        if metric.startswith((_TRAINING, _EVALUATION)):
            name = metric
        elif _EVALUATION + metric in names or (self._evaluates and not evaluated):
            name = _EVALUATION + metric
        else:
            name = _TRAINING + metric
        may_come = self._evaluates and name.startswith(_EVALUATION)
        has_part = evaluated if may_come else len(self) > 0
        if name not in names and has_part:
            raise errors.ConfigError(
                f"Expected one of the metrics {names}, or what follows the dot, found"
                f" `{metric}`."
            )
        return name

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dict for each round, what CSV and tables show.

        `round` is its number, from 1.
        """
        return [row_of(record) for record in self]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each round, by its number.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = import_extra("pandas", "pandas", "History.to_pandas")
        frame = pandas.DataFrame(self.rows())
        return frame.set_index("round") if len(self) else frame

    @tracebacks.shorten
    def plot(self, *metrics: str) -> Any:
        """Return a matplotlib figure with a panel for each metric, by its full name.

        Args:
            *metrics: names as for `values`; by default all but numbers of examples and
                elements of arrays.

        Raises:
            ConfigError: there is no such metric, or no round at all.
            UserError: matplotlib is not installed.
        """
        known = [
            name
            for name in self.names()
            if not name.endswith("num_examples")
            and not name.rpartition("/")[2].isdigit()
        ]
        chosen = [self._full_name(each) for each in metrics] or known
        if not chosen:
            raise errors.ConfigError(
                "Expected rounds with metrics to plot, found a history of"
                f" {len(self)} rounds without any number."
            )
        columns = min(len(chosen), _PANELS_A_ROW)
        rows = -(-len(chosen) // columns)
        figure = timeline.new_figure(4.5 * columns, 3.5 * rows)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for index, name in enumerate(chosen):
            _plot(panels[index], name, self, color=f"C{index}")
        for unused in panels[len(chosen) :]:
            unused.remove()
        return figure

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write when each worker did what in all rounds, in Chrome's trace format.

        Open the file in https://ui.perfetto.dev. On a context that is not ray_fed's,
        it has rounds alone.

        Args:
            path: of the file, JSON; its folder exists.

        Raises:
            StorageError: it cannot be written.
        """
        first = min((record.started_at for record in self), default=0.0)
        rounds = [
            timeline.TracedRound(
                record.round,
                record.started_at - first,
                record.seconds,
                [timeline.Span(*span) for span in record.spans],
            )
            for record in self
        ]
        try:
            pathlib.Path(path).write_text(json.dumps(timeline.trace(rounds)))
        except OSError as error:
            raise errors.StorageError(
                f"Expected to write the file `{os.fspath(path)}`, found"
                f" {type(error).__name__} ({error.strerror}): name another one."
            ) from error

    def _repr_html_(self) -> str:
        rows = [_shown_row(record) for record in self[-_SHOWN_ROWS:]]
        names = list(dict.fromkeys(name for row in rows for name in row))
        names.sort(key=_is_cost)  # numbers first: a page may be narrow
        above = f", the last {len(rows)} of them" if len(self) > len(rows) else ""
        return reprs.draw_table(
            f"{len(self)} rounds{above}",
            [{name: row.get(name) for name in names} for row in rows],
        )


def row_of(record: RoundRecord) -> dict[str, Any]:
    """Return a round as a flat dict: its cost, then its numbers."""
    return {
        "round": record.round,
        "clients": len(record.clients),
        "dropped": len(record.dropped),
        "retries": record.retries,
        "seconds": record.seconds,
        "bytes_sent": record.bytes_sent,
        "bytes_returned": record.bytes_returned,
        "bytes_read": record.bytes_read,
        **record.numbers(),
    }


def _show_numbers(record: RoundRecord) -> str:
    numbers = [f"{k} {reprs.show_number(v)}" for k, v in record.numbers().items()]
    return ", ".join(
        numbers[:_SHOWN_NUMBERS] + ["..."] * (len(numbers) > _SHOWN_NUMBERS)
    )


def _plot(panel: Any, name: str, history: History, color: str) -> None:
    """Draw a metric by round."""
    import matplotlib.ticker

    points = zip(
        (record.round for record in history), history.values(name), strict=True
    )
    found = [(number, value) for number, value in points if value is not None]
    panel.plot(*zip(*found, strict=True), color=color, marker=".")
    panel.set(xlabel="round", ylabel=name)
    panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.grid(alpha=0.3)


_RISING = (
    *("acc", "accuracy", "auc", "precision", "recall", "score", "io_u", "iou"),
    *("correlation", "sensitivity", "similarity", "specificity"),
)


@tracebacks.shorten_init
@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Ends a run once a metric has not become better for some time.

    It depends on the history alone, so that a resumed run ends where it would have.

    Attributes:
        monitor: the metric, as `History.values` takes it.
        patience: rounds that have the metric and may pass without a better one, >= 1.
        min_delta: by how much a value must be better to count, >= 0.
        mode: whether less is better, or more; "auto": by how the name ends, more for
            accuracies, AUC, precision, recall, scores (F1, R2), overlap (IoU),
            correlation and similarity, sensitivity and specificity; else less.

    Raises:
        ConfigError: a field is out of its range.
    """

    monitor: str
    patience: int = 1
    min_delta: float = 0.0
    mode: Literal["auto", "min", "max"] = "auto"

    def __post_init__(self) -> None:
        read_whole("patience", self.patience, 1)
        if not isinstance(self.min_delta, numbers.Real) or not self.min_delta >= 0:
            raise errors.ConfigError(
                "Expected a number of at least 0 as `min_delta`, found"
                f" {errors.describe(self.min_delta)}."
            )
        is_rising(self.monitor, self.mode)

    def __call__(self, history: History) -> bool:
        """Return whether the run should end after these rounds."""
        sign = -1.0 if is_rising(self.monitor, self.mode) else 1.0
        values = [sign * v for v in history.values(self.monitor) if v is not None]
        best, since = math.inf, 0
        for value in values:
            if value < best - self.min_delta:
                best, since = value, 0
            else:
                since += 1
        return since >= self.patience


def is_rising(metric: str, mode: str) -> bool:
    """Return whether more of a metric is better.

    Raises:
        ConfigError: the mode is none, or the metric no name.
    """
    _expect_name(metric)
    if mode not in ("auto", "min", "max"):
        raise errors.ConfigError(
            f'Expected "auto", "min" or "max" as `mode`, found {errors.describe(mode)}.'
        )
    name = re.sub(r"_\d+$", "", re.sub(r"(/\d+)+$", "", metric))  # auc_1, f1_score/0
    return mode == "max" or (mode == "auto" and name.endswith(_RISING))


def _expect_name(metric: object) -> None:
    if not isinstance(metric, str):
        raise errors.ConfigError(
            "Expected a metric by its name, such as `training.loss`, found"
            f" {errors.describe(metric)}."
        )
