"""The records of a run's rounds, as a sequence, a table and a plot.

Metrics are stored as plain values, so a saved run has the same types when it is loaded.
"""

import dataclasses
import json
import logging
import math
import operator
import os
import pathlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, overload

import ml_dtypes  # noqa: F401  # pyright: ignore[reportUnusedImport]  # numpy learns bfloat16
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.observability.timeline as timeline
import ray_fed.tracebacks as tracebacks
from ray_fed.imports import import_extra
from ray_fed.learning.checks import expect_one_of
from ray_fed.observability import reprs
from ray_fed.program.checkpoint_store import Decoder, Encoder, ReadOnlyDict, Versions
from ray_fed.program.record_log import RecordLog

_logger = logging.getLogger("ray_fed.learning.run_loop")

NUMBERS = "biufV"
"""Kinds of NumPy dtypes that are numbers. bfloat16 has the kind `V`."""

MOST_ELEMENTS = 100
"""Largest size of an array whose elements get names of their own."""


def read_evaluation(found: Any) -> dict[str, Any]:
    """Return the result of `evaluate` as plain values, as `read_metrics` does.

    Raises ValueMismatchError if it is not a mapping, has a value of an unsupported
    type, or gives two numbers one name.
    """
    if not isinstance(found, Mapping) and not hasattr(found, "_asdict"):
        raise errors.ValueMismatchError(
            "Expected metrics by name from `evaluate`, found"
            f" {errors.describe(found)} of type `{type(found).__name__}`: return a"
            ' mapping, such as {"loss": 0.5}, or what `learning.spread` makes of the'
            " metrics of each client."
        )
    return _check_names(read_metrics(found, "evaluation"), "from `evaluate`")


def read_training(found: Any) -> Any:
    """Return the metrics of training as plain values, as `read_metrics` does.

    Raises ValueMismatchError for a value of an unsupported type, or if two numbers have
    one name.
    """
    return _check_names(read_metrics(found, "training"), "of training")


def _check_names(metrics: Any, source: str) -> Any:
    names = Counter(name for name, _ in flatten_numbers(metrics))
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise errors.ValueMismatchError(
            f"Expected one number by each name {source}, found several by the names"
            f" {twice[:5]}: rename metrics. A member of `f1` has a name such as `f1/0`."
        )
    return metrics


def read_metrics(found: Any, label: str) -> Any:
    """Return metrics as plain values.

    Metrics are numbers, text, bytes, arrays, tensors, or mappings, lists and tuples of
    these. Mappings and named tuples become dicts. Tensors, and references to values,
    become NumPy arrays, or NumPy numbers if they have no dimension. Arrays are copied,
    and the copies are read-only. `label` is their name in errors. Raises
    ValueMismatchError for other types.
    """
    if found is None or type(found) in (bool, int, float, str, bytes):
        return found
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, Mapping):
        pairs = cast("Mapping[Any, Any]", found).items()
        read = {str(k): read_metrics(v, f"{label}.{k}") for k, v in pairs}
        if len(read) < len(pairs):
            raise errors.ValueMismatchError(
                f"Expected names in `{label}` that differ as text, found"
                f" {list(found)[:5]}: 1 and '1' are the same name."
            )
        return read
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


def stack_metrics(clients: Sequence[Any]) -> Any:
    """Return the metrics of clients with one read-only array for each metric.

    The first dimension of an array is the clients, in order. Without clients, the
    result is an empty dictionary.
    """
    return _stack([read_metrics(each, "client_metrics") for each in clients] or [{}])


def _stack(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        names = list(cast("dict[str, Any]", first))
        return {name: _stack([value[name] for value in values]) for name in names}
    if isinstance(first, list | tuple):
        members = cast("list[Any] | tuple[Any, ...]", first)
        return type(members)(_stack(list(each)) for each in zip(*values, strict=True))
    stacked = np.stack(values)
    stacked.flags.writeable = False
    return stacked


def _lock(metrics: Any) -> Any:
    """Return metrics that nobody can change, because a run saves them later."""
    if isinstance(metrics, Mapping):
        named = cast("Mapping[str, Any]", metrics)
        return ReadOnlyDict({name: _lock(value) for name, value in named.items()})
    if isinstance(metrics, list | tuple):
        return tuple(map(_lock, cast("Sequence[Any]", metrics)))
    if isinstance(metrics, np.ndarray):
        metrics = cast("NDArray[Any]", metrics).view()
        metrics.flags.writeable = False
    return metrics


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
        if isinstance(array, np.ndarray):  # others may write to this memory
            array = array.copy()
            array.flags.writeable = False
        return array
    return read_metrics(array.tolist(), label)


def is_number_type(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of a dtype contain numbers."""
    return dtype.kind in NUMBERS and not dtype.names


def flatten_numbers(metrics: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers in metrics, with names such as `loss` or `f1/0` and `f1/1`."""
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
    """Return the name of each element of an array, or [] if it has too many."""
    size = math.prod(shape)
    if size == 1:
        return [path]
    if size > MOST_ELEMENTS:
        return []
    return ["/".join([path, *map(str, index)]) for index in np.ndindex(*shape)]


def is_same(one: Any, other: Any) -> bool:
    """Return whether plain values are equal. NaN equals NaN here."""
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
    shown: dict[str, Any] = {}
    for name, value in row_of(record).items():
        way = name.removeprefix("bytes_")
        if way == name or value is None:
            shown[name if way == name else f"MB {way}"] = value
        else:
            shown[f"MB {way}"] = value / 1e6
    return shown


def _is_cost(name: str) -> bool:
    return name != "round" and not name.startswith(("training.", "evaluation."))


_SHOWN_ROWS = 20
_SHOWN_NUMBERS = 12
_TRAINING, _EVALUATION = "training.", "evaluation."


@dataclasses.dataclass(frozen=True, repr=False)
class RoundRecord:
    """The record of one round. All its metrics are plain values and cannot be changed.

    Attributes:
        round_index: Number of rounds of the run before this round.
        clients: Indices of the clients in the cohort, in order.
        training: Metrics of the clients' training. Here and in other metrics, mappings
            and arrays are read-only, and lists are tuples.
        evaluation: Metrics of `evaluate` after the round. None if the round was not
            evaluated.
        seconds: Time from the end of the previous round, or from the start of the first
            round, to the end of this round. It includes waiting for the evaluation and
            callbacks of the previous round, which run beside this round. The evaluation
            and callbacks of this round are not included.
        retries: Number of attempts after the first attempt of each subround, which is
            the work of some clients on a worker.
        dropped: Indices of clients that the round continued without.
        bytes_sent: Bytes that the clients of a real federation would receive: for each
            client of the cohort, the tensors of the server that its work uses, such as
            trainable weights and running statistics. None if the process does not know
            this number. The round's report has the bytes that ray_fed itself moves
            between processes.
        bytes_returned: Bytes that these clients would send: for each client that was
            not dropped, its update in the form that the aggregator sends, its weight,
            and the sums behind metrics. Frozen weights, weights of clients' own, and
            evaluation do not count. Like `bytes_sent`, this depends neither on the
            backend nor on the number of workers.
        bytes_read: Size of the states that this process read since the last record, to
            save them or for a callback.
        started_at: Time at which the round was called, in seconds since 1970.
        spans: Work of each worker over time, as tuples of the fields of
            `observability.timeline.Span`.
        candidates: Clients that were evaluated before the round for an adaptive
            sampler, as columns by name. `client` has their indices. The other columns
            have their metrics with the weights at the beginning of the round. None
            without an adaptive sampler.
        client_metrics: Metrics of each client's training, if the process has them, see
            `LearningProcess.with_client_metrics`. Each is an array with one value for
            each of `clients`, in their order.
        simulated_time: Simulated seconds of the run after the round, by the clock of
            `devices`. None without `devices`.
        wasted_seconds: Simulated seconds of clients' work that ended in this round and
            was not used, because a client was late, left or was one too many.
        versions: With `devices`, the version of the server's state from which each
            client worked: the number of rounds of the run before this state. Otherwise
            empty.
        live_versions: Number of server states that the run stored after the round: the
            newest state, and older states from which clients still work.
    """

    round_index: int
    clients: tuple[int, ...]
    training: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    seconds: float
    retries: int = 0
    dropped: tuple[int, ...] = ()
    bytes_sent: int | None = None
    bytes_returned: int | None = None
    bytes_read: int = 0
    started_at: float = 0.0
    spans: tuple[tuple[Any, ...], ...] = ()
    candidates: Mapping[str, tuple[float, ...]] | None = None
    client_metrics: Mapping[str, Any] | None = None
    simulated_time: float | None = None
    wasted_seconds: float = 0.0
    versions: tuple[int, ...] = ()
    live_versions: int = 1

    def __post_init__(self) -> None:
        for name in ("training", "evaluation", "candidates", "client_metrics"):
            object.__setattr__(self, name, _lock(getattr(self, name)))

    @property
    def round(self) -> int:
        """Number of the round, from 1, as in tables, plots and files."""
        return self.round_index + 1

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each client, the number of rounds since the state that it worked from."""
        return tuple(self.round_index - version for version in self.versions)

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
        """Return the numbers of metrics by name, such as `training.loss`.

        If a metric has several numbers, each has its own name, such as
        `evaluation.f1_score/0`. Arrays with more than 100 elements are left out.
        """
        parts = {_TRAINING: self.training, _EVALUATION: self.evaluation or {}}
        return {
            prefix + name: number
            for prefix, metrics in parts.items()
            for name, number in flatten_numbers(metrics)
        }

    def timeline(self) -> Any:
        """Return a matplotlib figure of the round's work, with a lane for each worker.

        Raises:
            UserError: matplotlib is not installed.
        """
        spans = [timeline.Span(*span) for span in self.spans]
        return timeline.draw_spans(spans, f"round {self.round} of the run")


def _read_numbers(records: Iterable[RoundRecord], name: str) -> list[float | None]:
    """Return `record.numbers().get(name)` of each record, in a faster way."""
    part, _, rest = name.partition(".")
    get_metrics = operator.attrgetter(part)
    is_inside = "/" in rest
    values: list[float | None] = []
    for record in records:
        metrics: Any = get_metrics(record)
        value = metrics.get(rest) if isinstance(metrics, dict) else metrics
        if type(value) is float or isinstance(value, np.floating):
            values.append(float(value))
        elif value is None and not is_inside:
            values.append(None)
        else:
            values.append(record.numbers().get(name))
    return values


class _Column:
    """The values of a metric by round.

    `values` has a value, or None, for each round that was read. `first` is the index of
    the first round with the metric, or None.
    """

    def __init__(self) -> None:
        self.values: list[float | None] = []
        self.first: int | None = None

    def add(self, values: Sequence[float | None]) -> None:
        if self.first is None:
            places = (i for i, value in enumerate(values) if value is not None)
            inside = next(places, None)
            self.first = None if inside is None else len(self.values) + inside
        self.values += values


class _Records:
    """The records of a run, and columns of its metrics, which only grow.

    Histories of one run share this object. So the history after one more round needs no
    copy and does not read the earlier rounds again.
    """

    def __init__(self, items: Iterable[RoundRecord]) -> None:
        self.items = list(items)
        self._columns: dict[str, _Column] = {}
        self._lock = threading.Lock()

    def column(self, name: str) -> _Column:
        """Return the column of a metric. `_EVALUATION` has 1 for evaluated rounds."""
        with self._lock:
            column = self._columns.setdefault(name, _Column())
            new = self.items[len(column.values) :]
            if name == _EVALUATION:
                column.add([None if r.evaluation is None else 1.0 for r in new])
            else:
                column.add(_read_numbers(new, name))
        return column


def to_json(record: RoundRecord) -> bytes:
    """Return a record as the bytes in which a run is saved."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return json.dumps(Encoder().describe(fields, f"round {record.round}")).encode()


def from_json(lines: Iterable[bytes]) -> list[RoundRecord]:
    """Return the records of lines that `to_json` returned."""
    return [RoundRecord(**Decoder().decode(json.loads(line))) for line in lines]


def open_log(path: object) -> RecordLog:
    """Return the log in which a run saves its records at the `storage_path` `path`."""
    return RecordLog(path, "history_")


_PANELS_A_ROW = 4  # of a plot: a notebook is about as wide


class History(Sequence[RoundRecord]):
    """The records of a run's rounds, in order.

    Args:
        records: Records from the first round on.
        evaluates: Whether the run evaluates. If so, the name of a metric without a
            prefix means the evaluation's metric.
    """

    def __init__(
        self, records: Iterable[RoundRecord] = (), *, evaluates: bool = False
    ) -> None:
        self._shared = _Records(records)
        self._size = len(self._shared.items)
        self._evaluates = evaluates

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> "History": ...
    @override
    def __getitem__(self, index: int | slice) -> "RoundRecord | History":
        if isinstance(index, slice):
            places = range(self._size)[index]
            records = (self._shared.items[place] for place in places)
            return History(records, evaluates=self._evaluates)
        return self._shared.items[range(self._size)[index]]

    @override
    def __len__(self) -> int:
        return self._size

    @classmethod
    @tracebacks.shorten
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Return the history of a saved run, which may still be running.

        Args:
            path: The `storage_path` of the run. Nothing is written there.

        Raises:
            ConfigError: No round of a run is saved there.
            StorageError: The path cannot be read.
            SavedStateError: All records are damaged.
        """
        rounds = Versions(path, "round_").find()  # records are written first
        if not rounds:
            raise errors.ConfigError(
                f"Expected the rounds of a run in `{os.fspath(path)}`, found none: pass"
                " its `storage_path`."
            )
        log = open_log(path)
        records = from_json(log.read())
        whole = [record for record in records if record.round_index < rounds[-1]]
        if not whole:
            raise errors.SavedStateError(
                f"Expected the records of rounds in `{log.where}`, found none that is"
                " whole."
            )
        if whole[-1].round < rounds[-1]:
            _logger.warning(
                "Of %d rounds in `%s`, the records after round %d are damaged or lost.",
                rounds[-1],
                log.where,
                whole[-1].round,
            )
        evaluates = any(record.evaluation is not None for record in whole)
        return cls(whole, evaluates=evaluates)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return list(self) == list(other)

    @override
    def __hash__(self) -> int:
        return hash(tuple(record.round_index for record in self))

    def with_round(self, record: RoundRecord) -> "History":
        """Return a history of these rounds and one more round."""
        items = self._shared.items
        if len(items) == self._size:
            items.append(record)
        elif items[self._size] is not record:  # another history continued this one
            return History((*self, record), evaluates=self._evaluates)
        more = History(evaluates=self._evaluates)
        more._shared, more._size = self._shared, self._size + 1
        return more

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
        """Return a metric by round, with None for rounds without the metric.

        Args:
            metric: One of `names()`, or its name without a prefix, such as `loss`.
                Without a prefix, this means the evaluation's metric if the run
                evaluates, and otherwise the training's metric.

        Raises:
            ConfigError: Rounds have metrics, but not this metric.
        """
        name = self.full_name(metric)
        return self._shared.column(name).values[: self._size]

    def full_name(self, metric: str) -> str:
        """Return the name of a metric with its prefix.

        Args:
            metric: Name of a metric, as for `values`.

        Raises:
            ConfigError: Rounds have metrics, but not this metric.
        """
        expect_name(metric)
        if metric.startswith(_TRAINING) and self._has(metric):
            return metric
        evaluated = self._has(_EVALUATION)
        if metric.startswith((_TRAINING, _EVALUATION)):
            name = metric
        elif self._has(_EVALUATION + metric) or (self._evaluates and not evaluated):
            name = _EVALUATION + metric
        else:
            name = _TRAINING + metric
        may_come = self._evaluates and name.startswith(_EVALUATION)
        has_part = evaluated if may_come else self._size > 0
        if has_part and not self._has(name):
            raise errors.ConfigError(
                f"Expected one of the metrics {self.names()}, or what follows the dot,"
                f" found `{metric}`."
            )
        return name

    def _has(self, name: str) -> bool:
        first = self._shared.column(name).first
        return first is not None and first < self._size

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat dict for each round, as in CSV files and tables.

        A row has `round`, the number of the round from 1, then its costs, then its
        metrics.
        """
        return [row_of(record) for record in self]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame of `rows()`, indexed by the number of the round.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = import_extra("pandas", "History.to_pandas")
        frame = pandas.DataFrame(self.rows())
        return frame.set_index("round") if len(self) else frame

    @tracebacks.shorten
    def plot(
        self, *metrics: str, x: Literal["round", "simulated_time"] = "round"
    ) -> Any:
        """Return a matplotlib figure with a panel for each metric.

        Args:
            *metrics: Names as for `values`. By default these are all metrics except
                numbers of examples and elements of arrays.
            x: Horizontal axis: "round" for the number of the round, or "simulated_time"
                for the simulated hours of the run.

        Raises:
            ConfigError: There is no such metric, no round, or no simulated time.
            UserError: matplotlib is not installed.
        """
        known = list(filter(is_curve, self.names()))
        chosen = [self.full_name(each) for each in metrics] or known
        if not chosen:
            raise errors.ConfigError(
                "Expected rounds with metrics to plot, found a history of"
                f" {len(self)} rounds without any number."
            )
        expect_one_of("x", x, ("round", "simulated_time"))
        if x == "simulated_time" and any(r.simulated_time is None for r in self):
            raise errors.ConfigError(
                "Expected rounds with a simulated time, found some without: pass"
                " `devices` to `learning.run`."
            )
        figure, panels = new_panels(len(chosen))
        for index, name in enumerate(chosen):
            _plot(panels[index], name, self, x, color=f"C{index}")
        return figure

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the work of each worker in all rounds, in Chrome's trace format.

        Open the file in https://ui.perfetto.dev. If rounds ran on a context that is not
        ray_fed's, the file has only the rounds.

        Args:
            path: Path of the JSON file, whose folder exists.

        Raises:
            StorageError: The file cannot be written.
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
        names.sort(key=_is_cost)  # metrics first, because a page may be narrow
        above = f", the last {len(rows)} of them" if len(self) > len(rows) else ""
        return reprs.draw_table(
            f"{len(self)} rounds{above}",
            [{name: row.get(name) for name in names} for row in rows],
        )


def row_of(record: RoundRecord) -> dict[str, Any]:
    """Return a round as a flat dict, with its cost before its metrics."""
    return {
        "round": record.round,
        "clients": len(record.clients),
        "dropped": len(record.dropped),
        "retries": record.retries,
        "seconds": record.seconds,
        "bytes_sent": record.bytes_sent,
        "bytes_returned": record.bytes_returned,
        "bytes_read": record.bytes_read,
        **_clock_row(record),
        **record.numbers(),
    }


def _clock_row(record: RoundRecord) -> dict[str, Any]:
    """Return the part of a row about `devices`. Staleness and version are means."""
    if record.simulated_time is None:
        return {}
    count = len(record.versions)
    return {
        "simulated_time": record.simulated_time,
        "wasted_seconds": record.wasted_seconds,
        "staleness": sum(record.staleness) / count if count else None,
        "version": sum(record.versions) / count if count else None,
        "live_versions": record.live_versions,
    }


def _show_numbers(record: RoundRecord) -> str:
    numbers = [f"{k} {reprs.show_number(v)}" for k, v in record.numbers().items()]
    return ", ".join(
        numbers[:_SHOWN_NUMBERS] + ["..."] * (len(numbers) > _SHOWN_NUMBERS)
    )


def new_panels(count: int) -> tuple[Any, list[Any]]:
    """Return a matplotlib figure with `count` panels, and a list of the panels."""
    columns = min(count, _PANELS_A_ROW)
    rows = -(-count // columns)
    figure = timeline.new_figure(4.5 * columns, 3.5 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in panels[count:]:
        unused.remove()
    return figure, list(panels[:count])


def use_whole_rounds(panel: Any) -> None:
    """Format a panel whose horizontal axis is rounds: whole numbers and a grid."""
    import matplotlib.ticker

    panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    panel.ticklabel_format(axis="y", useOffset=False)
    panel.grid(alpha=0.3)


def is_curve(name: str) -> bool:
    """Return whether plots show a metric if the user named no metrics.

    Plots leave out numbers of examples and elements of arrays.
    """
    return not name.endswith("num_examples") and not name.rpartition("/")[2].isdigit()


def _plot(panel: Any, name: str, history: History, x: str, color: str) -> None:
    is_round = x == "round"
    places = [r.round if is_round else (r.simulated_time or 0) / 3600 for r in history]
    points = zip(places, history.values(name), strict=True)
    found = [(place, value) for place, value in points if value is not None]
    panel.plot(*zip(*found, strict=True), color=color, marker=".")
    panel.set(xlabel="round" if is_round else "simulated hours", ylabel=name)
    if is_round:
        use_whole_rounds(panel)
    else:
        panel.ticklabel_format(axis="y", useOffset=False)
        panel.grid(alpha=0.3)


def expect_name(metric: object) -> None:
    """Raise ConfigError unless a value is text, such as the name of a metric."""
    if not isinstance(metric, str):
        raise errors.ConfigError(
            "Expected a metric by its name, such as `training.loss`, found"
            f" {errors.describe(metric)}."
        )
