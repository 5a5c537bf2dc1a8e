"""Callbacks of `learning.run`: tables, trackers, saved models and early stopping.

A callback is any object with a method `on_round(record)`. The class `Callback`
documents the other methods. When a run begins or is resumed, CSV and JSONLines write
their whole file from the history. So the file has one row for each round, even if the
program was killed after a row was written and before the round was saved. A file that
is replaced is never half-written. Trackers need extras, which are imported when a
callback is made.
"""

import asyncio
import contextlib
import csv
import inspect
import io
import itertools
import json
import logging
import math
import os
import pathlib
import re
import time
import uuid
from collections.abc import Generator, Sequence
from typing import Any, Literal

import federated_language as fl
import numpy as np
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks
from ray_fed.files.opening import expand_home
from ray_fed.imports import import_extra, install_command
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.checks import check_number, expect_one_of
from ray_fed.learning.history import History, RoundRecord, expect_name, row_of
from ray_fed.learning.models import Model
from ray_fed.observability import reprs

__all__ = [
    "CSV",
    "Callback",
    "EarlyStopping",
    "JSONLines",
    "MLflow",
    "ModelCheckpoint",
    "TensorBoard",
    "WandB",
]

_logger = logging.getLogger("ray_fed.learning.run_loop")


class Callback:
    """A callback that does nothing. Override the methods that you need.

    The run calls the methods on a thread, one at a time, while the next round is
    computed. If a program is killed, its resumed run repeats the rounds after the last
    saved state and reports them again.
    """

    @override
    def __repr__(self) -> str:
        return f"<callback {type(self).__name__}>"

    def on_start(self, history: History) -> None:
        """Receive the rounds before a resume, or an empty history for a new run."""

    def on_round(self, record: RoundRecord) -> None:
        """Receive the record of a round, after the round was evaluated."""

    def needs_state(self, record: RoundRecord) -> bool:  # noqa: ARG002
        """Return whether `on_state` should be called after this round."""
        return False

    def on_state(self, record: RoundRecord, state: Any) -> None:
        """Receive the server's state after a round, as plain values (NumPy arrays)."""

    def should_stop(self, history: History) -> bool:  # noqa: ARG002
        """Return whether the run should end after the rounds in `history`."""
        return False

    def on_end(self, history: History, reason: str) -> None:
        """Receive the history when the run ends, also after an error."""

    def choose_state(self, state: Any) -> Any:
        """Return the server's state that the run returns. `state` is the last one."""
        return state


class ReleaseCallback(Callback):
    """Calls a release manager of federated_language after each round.

    The manager receives the value `{"training": ..., "evaluation": ...}`, which has the
    metrics, and the round's number, from 1, as the key.
    """

    def __init__(self, manager: fl.program.ReleaseManager[Any, int]) -> None:
        self._manager = manager
        self.name = type(manager).__name__

    @override
    def on_round(self, record: RoundRecord) -> None:
        value = {"training": record.training, "evaluation": record.evaluation}
        asyncio.run(self._manager.release(value, record.round))


class Callbacks:
    """All callbacks of a run, called in order.

    An error of a callback is raised as CallbackError. With `logs`, the error is logged
    instead, and the run continues. The constructor raises ConfigError for an object
    that is neither a callback nor a release manager.
    """

    def __init__(self, callbacks: Sequence[Any], *, logs: bool) -> None:
        self._callbacks = [_as_callback(each) for each in callbacks]
        self._logs = logs

    def start(self, history: History) -> None:
        for each in self._callbacks:
            self._call(each, "on_start", "as the run began", history)

    def round(self, record: RoundRecord) -> None:
        """Report a round. If a callback raises, later callbacks are not called."""
        when = f"after round {record.round}"
        for each in self._callbacks:
            self._call(each, "on_round", when, record)

    def wanting_state(self, record: RoundRecord) -> list[Any]:
        """Return the callbacks that need the state after a round."""
        when = f"after round {record.round}"
        return [
            each
            for each in self._callbacks
            if self._call(each, "needs_state", when, record)
        ]

    def state(self, wanting: Sequence[Any], record: RoundRecord, state: Any) -> None:
        when = f"after round {record.round}"
        for each in wanting:
            self._call(each, "on_state", when, record, state)

    def should_stop(self, history: History) -> bool:
        """Ask all callbacks, and return whether one of them ends the run."""
        when = f"after round {history[-1].round}"
        asked = [self._call(c, "should_stop", when, history) for c in self._callbacks]
        return any(asked)

    def end(self, history: History, reason: str) -> None:
        """Report the end of the run to all callbacks, then raise their first error."""
        first: errors.CallbackError | None = None
        for each in self._callbacks:
            try:
                self._call(each, "on_end", "as the run ended", history, reason)
            except errors.CallbackError as error:
                first = first or error
        if first is not None:
            raise first

    def choose_state(self, state: Any) -> Any:
        """Return the state that the run returns, by default the last one."""
        for each in self._callbacks:
            chosen = self._call(each, "choose_state", "as the run ended", state)
            state = state if chosen is None else chosen
        return state

    def _call(self, callback: Any, method: str, when: str, *args: Any) -> Any:
        hook = getattr(callback, method, None)
        if hook is None:
            return None
        try:
            return hook(*args)
        except Exception as error:
            name = getattr(callback, "name", None) or type(callback).__name__
            if self._logs:
                _logger.exception("The callback %s raised %s.", name, when)
                return None
            raise errors.CallbackError(
                f"Expected the callback `{name}` to return from `{method}` {when},"
                f" found {error_texts.summarize(error).rstrip('.')}. A run with a"
                ' `storage_path` is saved. Pass on_error="log" to log such errors.'
            ) from error


def _as_callback(found: Any) -> Any:
    if isinstance(found, fl.program.ReleaseManager):
        return ReleaseCallback(found)
    if isinstance(found, type) or not hasattr(found, "on_round"):
        then = (
            "callbacks of Keras follow its own epochs; `learning.callbacks` has others,"
            " such as `EarlyStopping`"
        )
        if hasattr(found, "on_round"):
            then = f"pass an object of the class, `{found.__name__}(...)`"
        elif inspect.isroutine(found):
            then = (
                "pass a function as the method of an object,"
                " `types.SimpleNamespace(on_round=function)`"
            )
        raise errors.ConfigError(
            "Expected objects with a method `on_round(record)`, or release managers, as"
            f" `callbacks`, found {errors.describe(found)}: {then}."
        )
    return found


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Generator[pathlib.Path]:
    """Yield a temporary path. At the end, the file at this path replaces `path`."""
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
    """Turn an OSError of the block into a StorageError that names the file `path`."""
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
    """Raise StorageError if `path` cannot be written. An existing file stays."""
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "a folder has that name")
        temporary.touch()
        temporary.unlink()


class CSV(Callback):
    """Writes one row for each round to a CSV file.

    `History.rows()` describes the columns. If a later round has a new metric, such as
    the first evaluation, the file is written again with the new column.

    Args:
        path: Path of the file. Its folder is created.
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
    """Writes one JSON object for each round, on its own line.

    `History.rows()` describes the names. A number that JSON cannot express is null:
    NaN, such as the loss without examples, or infinity.

    Args:
        path: Path of the file. Its folder is created.
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
    rows = (
        {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in row_of(record).items()
        }
        for record in records
    )
    return [json.dumps(row, allow_nan=False) + "\n" for row in rows]


def _append(path: pathlib.Path, text: str) -> None:
    with telling(path), path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def _replace(path: pathlib.Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


_RISING = (
    *("acc", "accuracy", "auc", "precision", "recall", "score", "io_u", "iou"),
    *("correlation", "sensitivity", "similarity", "specificity"),
)


class _Best:
    """The round with the best value of a metric so far. `read` adds rounds.

    Attributes:
        place: Index of the best round in the history, or None if no round has the
            metric.
        since: Number of rounds with the metric after the best round.
        is_last: Whether the last round is better than all rounds before it.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        self._monitor, self._min_delta = monitor, min_delta
        self._sign = -1.0 if _is_rising(monitor, mode) else 1.0
        self._restart()

    def _restart(self) -> None:
        self._name, self._size = "", 0  # the metric, and the number of rounds read
        self._last: RoundRecord | None = None
        self.place: int | None = None
        self._value, self.since, self.is_last = math.inf, 0, False

    def read(self, history: History) -> None:
        """Read a history: only its new rounds, if it continues the last history."""
        name, size = history.full_name(self._monitor), self._size
        goes_on = 0 < size <= len(history) and history[size - 1] is self._last
        if name != self._name or not goes_on:
            self._restart()
        best, since, sign, delta = self._value, self.since, self._sign, self._min_delta
        values = history.values(name)[self._size :]
        for place, value in enumerate(values, self._size):
            since += value is not None
            if value is not None and sign * value < best - delta:
                best, since, self.place = sign * value, 0, place
        if values:
            self.is_last = values[-1] is not None and since == 0
            self._last = history[-1]
        self._value, self.since = best, since
        self._name, self._size = name, len(history)


def _is_rising(metric: str, mode: str) -> bool:
    """Return whether a higher value of a metric is better, by `mode` or its name."""
    expect_name(metric)
    expect_one_of("mode", mode, ("auto", "min", "max"))
    name = re.sub(r"_\d+$", "", re.sub(r"(/\d+)+$", "", metric))  # auc_1, f1_score/0
    return mode == "max" or (mode == "auto" and name.endswith(_RISING))


class _BestRound(Callback):
    """A callback that needs the state of each round that is the best so far."""

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self._best = _Best(monitor, mode, min_delta)
        self._history: Any = None  # until a run begins

    @override
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_history": None}

    @override
    def on_start(self, history: History) -> None:
        self._history = history

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._history = self._history.with_round(record)

    @override
    def needs_state(self, record: RoundRecord) -> bool:
        self._best.read(self._history)
        return self._best.is_last


@tracebacks.shorten_init
class EarlyStopping(_BestRound):
    """Ends a run when a metric has not improved for some rounds.

    The decision depends on the history alone, so a resumed run ends after the same
    round.

    Args:
        monitor: Name of the metric, as for `History.values`.
        patience: Number of rounds without a better value after which the run ends,
            >= 1. Rounds without the metric do not count.
        min_delta: Least difference from the best value that counts as better, >= 0.
        mode: "min" if lower values are better, "max" if higher values are better.
            "auto" decides by the end of the metric's name: higher values are better for
            accuracies, AUC, precision, recall, scores (F1, R2), overlap (IoU),
            correlation, similarity, sensitivity and specificity.
        best_weights: File for the weights of the best round, such as "runs/best.npz".
            The run then returns its last state with these weights. None: the run
            returns the weights of the last round.

    Raises:
        ConfigError: An argument is out of its range.
    """

    def __init__(
        self,
        monitor: str,
        patience: int = 1,
        min_delta: float = 0.0,
        mode: Literal["auto", "min", "max"] = "auto",
        best_weights: str | os.PathLike[str] | None = None,
    ) -> None:
        self._patience = read_whole("patience", patience, 1)
        check_number("min_delta", min_delta, lambda d: d >= 0, "of at least 0")
        super().__init__(monitor, mode, min_delta)
        self._path: pathlib.Path | None = None
        if best_weights is not None:
            self._path = pathlib.Path(expand_home(best_weights))
            if self._path.suffix != ".npz":
                raise errors.ConfigError(
                    "Expected a name that ends with .npz as `best_weights`, found"
                    f" `{self._path}`."
                )

    @override
    def __repr__(self) -> str:
        return f"EarlyStopping({self.monitor!r}, patience={self._patience})"

    @override
    def on_start(self, history: History) -> None:
        super().on_start(history)
        if self._path is not None:
            check_place(self._path)

    @override
    def needs_state(self, record: RoundRecord) -> bool:
        return self._path is not None and super().needs_state(record)

    @override
    def on_state(self, record: RoundRecord, state: Any) -> None:
        assert self._path is not None
        # The weights are saved as bytes, because npz files have no bfloat16.
        leaves = [np.frombuffer(w.tobytes(), np.uint8) for w in _weights_of(state)]
        with replacing(self._path) as temporary:
            np.savez(temporary, np.array(record.round), *leaves)

    @override
    def should_stop(self, history: History) -> bool:
        self._best.read(history)
        return self._best.since >= self._patience

    def __call__(self, history: History) -> bool:
        """Return `should_stop(history)`, so that `run(stop=...)` accepts the object."""
        return self.should_stop(history)

    @override
    def choose_state(self, state: Any) -> Any:
        place = self._best.place
        if self._path is None or place is None:
            return state
        with telling(self._path), np.load(self._path) as saved:
            number, *leaves = (saved[name] for name in saved.files)
        expected = self._history[place].round
        if number != expected:
            raise errors.ConfigError(
                f"Expected the weights of round {expected} in `{self._path}`, found"
                f" those of round {number}: another run, or later rounds before a kill,"
                " wrote them. Run more rounds, or begin with another `storage_path`."
            )
        found = (
            np.frombuffer(leaf.tobytes(), like.dtype).reshape(like.shape)
            for leaf, like in zip(leaves, _weights_of(state), strict=True)
        )
        weights = type(state.weights)(
            *(tuple(itertools.islice(found, len(part))) for part in state.weights)
        )
        return state._replace(weights=weights)


def _weights_of(state: Any) -> list[Any]:
    return [np.asarray(weight) for part in state.weights for weight in part]


class ModelCheckpoint(_BestRound):
    """Saves the model of the best round so far, as a `.keras` file.

    Args:
        path: Path of the file. Each better model replaces it, and it is never
            half-written.
        model: Model that is trained.
        monitor: Name of the metric that decides, as for `History.values`.
        mode: Whether lower or higher values are better, as for `EarlyStopping`.

    Raises:
        ConfigError: `path` does not end with .keras, or `mode` is unknown.
        ValueMismatchError: `Model.to_keras` fails for the model when a run begins.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Model,
        monitor: str = "loss",
        mode: Literal["auto", "min", "max"] = "auto",
    ) -> None:
        self._path = pathlib.Path(expand_home(path))
        if self._path.suffix != ".keras":
            raise errors.ConfigError(
                f"Expected a name that ends with .keras, found `{self._path}`."
            )
        self._model = model
        super().__init__(monitor, mode)

    @override
    def __repr__(self) -> str:
        path = reprs.shorten(str(self._path))
        return f"ModelCheckpoint({path!r}, monitor={self.monitor!r})"

    @override
    def on_start(self, history: History) -> None:
        super().on_start(history)
        check_place(self._path)
        # A layer that cannot be copied ends the run here, not after its first round.
        self._model.to_keras(self._model.initial_weights())

    @override
    def on_state(self, record: RoundRecord, state: Any) -> None:
        with replacing(self._path) as temporary:
            self._model.to_keras(state).save(temporary)


class MLflow(Callback):
    """Logs each number of a round as a metric of one MLflow run.

    A resumed run continues the latest MLflow run with its name in the experiment.

    Args:
        run_name: Name of the MLflow run.
        experiment: Name of the experiment, which is created if it does not exist.
        tracking_uri: URI of a server, such as "http://localhost:5000", or of a file,
            such as "sqlite:///mlflow.db". A folder, such as "file:///runs", needs
            MLFLOW_ALLOW_FILE_STORE=true in the environment. None: the URI that MLflow
            is configured with.

    Raises:
        UserError: mlflow is not installed. The extra has mlflow-skinny, alembic and
            sqlalchemy, which are enough.
        ConfigError: MLflow cannot store runs at `tracking_uri`.
    """

    def __init__(
        self,
        run_name: str,
        experiment: str = "Default",
        tracking_uri: str | None = None,
    ) -> None:
        mlflow = import_extra("mlflow", "callbacks.MLflow")
        self._client = _open(mlflow, tracking_uri)
        self._run_name = run_name
        self._experiment = experiment
        self._run_id = ""

    @override
    def __repr__(self) -> str:
        # Without the URI, which may have a password.
        return f"MLflow({self._run_name!r}, experiment={self._experiment!r})"

    @override
    def on_start(self, history: History) -> None:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            experiment_id = self._client.create_experiment(self._experiment)
        else:
            experiment_id = found.experiment_id
        self._run_id = self._find(experiment_id) if history else ""
        if not self._run_id:
            run = self._client.create_run(experiment_id, run_name=self._run_name)
            self._run_id = run.info.run_id

    def _find(self, experiment_id: str) -> str:
        # MLflow's filter cannot escape quotes. A name with both kinds of quotes is
        # searched among the latest 1,000 runs.
        name, quote = self._run_name, '"' if "'" in self._run_name else "'"
        named = "" if quote in name else f"attributes.run_name = {quote}{name}{quote}"
        runs = self._client.search_runs([experiment_id], named)
        return next((r.info.run_id for r in runs if r.info.run_name == name), "")

    @override
    def on_round(self, record: RoundRecord) -> None:
        for name, value in record.numbers().items():
            self._client.log_metric(self._run_id, name, value, step=record.round)

    @override
    def on_end(self, history: History, reason: str) -> None:
        if not self._run_id:
            return
        self._client.set_tag(self._run_id, "ray_fed.reason", reason)
        ends = {"finished": "FINISHED", "stopped early": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._run_id, ends.get(reason, "KILLED"))


def _open(mlflow: Any, tracking_uri: str | None) -> Any:
    try:
        return mlflow.MlflowClient(tracking_uri)
    except mlflow.MlflowException as error:
        where = mlflow.get_tracking_uri() if tracking_uri is None else tracking_uri
        raise errors.ConfigError(
            f"Expected a place where MLflow can keep runs, found `{where}`"
            f" ({errors.describe(str(error))}): pass the `tracking_uri` of a server,"
            ' such as "http://localhost:5000", or "sqlite:///mlflow.db" after'
            f" `{install_command('mlflow')}`, or a folder with"
            " MLFLOW_ALLOW_FILE_STORE=true in the environment."
        ) from error


class TensorBoard(Callback):
    """Writes each number of a round as a scalar for TensorBoard.

    After a resume, TensorBoard shows each repeated round once.

    Args:
        log_dir: Folder of the logs.

    Raises:
        UserError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._writers, self._events, self._summaries = (
            import_extra(f"tensorboard.{module}", "callbacks.TensorBoard")
            for module in (
                "summary.writer.event_file_writer",
                "compat.proto.event_pb2",
                "compat.proto.summary_pb2",
            )
        )
        self._log_dir = expand_home(log_dir)
        self._writer: Any = None

    @override
    def __repr__(self) -> str:
        return f"TensorBoard({reprs.shorten(self._log_dir)!r})"

    @override
    def on_start(self, history: History) -> None:
        self._writer = self._writers.EventFileWriter(self._log_dir)
        if history:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            step = history[-1].round + 1
            self._add(session_log=start, step=step)

    @override
    def on_round(self, record: RoundRecord) -> None:
        numbers = {"seconds": record.seconds, "retries": record.retries}
        values = [
            self._summaries.Summary.Value(
                tag=name.replace(".", "/", 1), simple_value=value
            )
            for name, value in {**record.numbers(), **numbers}.items()
        ]
        summary = self._summaries.Summary(value=values)
        self._add(summary=summary, step=record.round)
        self._writer.flush()

    def _add(self, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), **fields)
        self._writer.add_event(event)

    @override
    def on_end(self, history: History, reason: str) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB(Callback):
    """Logs each number of a round to one run of Weights and Biases.

    Args:
        project: Name of the project.
        run_id: Id of the run. A resumed run continues the run with this id.
        mode: "online", or "offline" to upload later. None: the configuration of wandb.
        folder: Folder for wandb's files. None: the working directory.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        run_id: str,
        mode: Literal["online", "offline"] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._wandb = import_extra("wandb", "callbacks.WandB")
        self._options: dict[str, Any] = {
            "project": project,
            "id": run_id,
            "mode": mode,
            "dir": None if folder is None else os.fspath(folder),
        }
        self._run: Any = None

    @override
    def __repr__(self) -> str:
        return f"WandB({self._options['project']!r}, run_id={self._options['id']!r})"

    @override
    def on_start(self, history: History) -> None:
        self._run = self._wandb.init(resume="allow", **self._options)
        # With `round` as the axis, a round that is logged again does no harm.
        self._run.define_metric("*", step_metric="round")

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._run.log({"round": record.round, **record.numbers()})

    @override
    def on_end(self, history: History, reason: str) -> None:
        if self._run is not None:
            self._run.finish(
                exit_code=0 if reason in ("finished", "stopped early") else 1
            )
