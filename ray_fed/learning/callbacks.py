"""What a run tells others: tables, trackers, models. One class each.

A callback is any object with `on_round(record)`; `Callback` has the other hooks. A file
is written anew from the history as a run begins or is resumed, so that a row is there
once, also after a kill between a row and a saved state; files that are replaced are
there whole or not at all. The libraries of trackers are extras, imported where a
callback is made.
"""

import asyncio
import contextlib
import csv
import inspect
import io
import json
import logging
import math
import os
import pathlib
import time
import uuid
from collections.abc import Generator, Sequence
from typing import Any, Literal

import federated_language as fl
from typing_extensions import override

import ray_fed.error_texts as error_texts
import ray_fed.errors as errors
from ray_fed.files.opening import expand_home
from ray_fed.imports import import_extra
from ray_fed.learning.history import History, RoundRecord, is_rising, row_of
from ray_fed.learning.models import Model
from ray_fed.observability import reprs

__all__ = [
    "CSV",
    "Callback",
    "JSONLines",
    "MLflow",
    "ModelCheckpoint",
    "TensorBoard",
    "WandB",
]

_logger = logging.getLogger("ray_fed.learning.run_loop")


class Callback:
    """A callback that does nothing: override what you need; all are optional.

    Methods are called on a thread of the run, one after another, while the next round
    runs. After a kill, rounds since the last saved one are told again.
    """

    @override
    def __repr__(self) -> str:
        return f"<callback {type(self).__name__}>"

    def on_start(self, history: History) -> None:
        """Take the rounds before a resume; empty where a run begins."""

    def on_round(self, record: RoundRecord) -> None:
        """Take what a round did, once it is evaluated."""

    def needs_state(self, record: RoundRecord) -> bool:  # noqa: ARG002
        """Return whether `on_state` is to be called after this round."""
        return False

    def on_state(self, record: RoundRecord, state: Any) -> None:
        """Take the state after a round, as plain values."""

    def on_end(self, history: History, reason: str) -> None:
        """Take the end of the run, also where it failed."""


class ReleaseCallback(Callback):
    """Releases metrics with a release manager of federated_language.

    The manager is given `{"training": ..., "evaluation": ...}` with the number
    of the round, from 1, as the key.

    Args:
        manager: releases them.
    """

    def __init__(self, manager: fl.program.ReleaseManager[Any, int]) -> None:
        self._manager = manager
        self.name = type(manager).__name__

    @override
    def on_round(self, record: RoundRecord) -> None:
        value = {"training": record.training, "evaluation": record.evaluation}
        asyncio.run(self._manager.release(value, record.round))


class Callbacks:
    """All callbacks of a run.

    Args:
        callbacks: objects with `on_round`, and release managers.
        logs: whether what one raises is logged, and the run goes on.

    Raises:
        ConfigError: something is neither.
    """

    def __init__(self, callbacks: Sequence[Any], *, logs: bool) -> None:
        self._callbacks = [_as_callback(each) for each in callbacks]
        self._logs = logs

    def start(self, history: History) -> None:
        """Tell all that the run begins.

        Raises:
            CallbackError: one of them raised.
        """
        for each in self._callbacks:
            self._call(each, "on_start", "as the run began", history)

    def round(self, record: RoundRecord) -> None:
        """Tell all that a round is done.

        Raises:
            CallbackError: one of them raised; those after it were not told.
        """
        when = f"after round {record.round}"
        for each in self._callbacks:
            self._call(each, "on_round", when, record)

    def wanting_state(self, record: RoundRecord) -> list[Any]:
        """Return those that want the state after a round."""
        when = f"after round {record.round}"
        return [
            each
            for each in self._callbacks
            if self._call(each, "needs_state", when, record)
        ]

    def state(self, wanting: Sequence[Any], record: RoundRecord, state: Any) -> None:
        """Give some the state after a round."""
        when = f"after round {record.round}"
        for each in wanting:
            self._call(each, "on_state", when, record, state)

    def end(self, history: History, reason: str) -> None:
        """Tell all that the run ends, each also where another one raised.

        Raises:
            CallbackError: one of them raised.
        """
        first: errors.CallbackError | None = None
        for each in self._callbacks:
            try:
                self._call(each, "on_end", "as the run ended", history, reason)
            except errors.CallbackError as error:
                first = first or error
        if first is not None:
            raise first

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
                f" found {error_texts.summarize(error).rstrip('.')}. What has a"
                ' `storage_path` is saved; on_error="log" goes on without it.'
            ) from error


def _as_callback(found: Any) -> Any:
    if isinstance(found, fl.program.ReleaseManager):
        return ReleaseCallback(found)
    if isinstance(found, type) or not hasattr(found, "on_round"):
        then = (
            "those of Keras are told of its own epochs, and `learning.EarlyStopping` is"
            " passed as `stop`"
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
    """Yield a path to write to; what is there at the end becomes the file.

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
    rows = (
        {k: v if math.isfinite(v) else None for k, v in row_of(record).items()}
        for record in records
    )
    return [json.dumps(row, allow_nan=False) + "\n" for row in rows]


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
        monitor: the metric, as `History.values` takes it; the best round has the best
            value.
        mode: as for `EarlyStopping`.

    Raises:
        ConfigError: the path has another suffix, or the mode is none.
        ValueMismatchError: as a run begins: as `Model.to_keras` says.
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
        self.monitor = monitor
        self._is_rising = is_rising(monitor, mode)
        self._history = History()

    @override
    def __repr__(self) -> str:
        path = reprs.shorten(str(self._path))
        return f"ModelCheckpoint({path!r}, monitor={self.monitor!r})"

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
        *before, now = self._history.values(self.monitor)
        if now is None or now != now:  # noqa: PLR0124 (a loss over no examples is NaN)
            return False
        known = [v for v in before if v is not None and v == v]  # noqa: PLR0124
        return all(now > v if self._is_rising else now < v for v in known)

    @override
    def on_state(self, record: RoundRecord, state: Any) -> None:
        with replacing(self._path) as temporary:
            self._model.to_keras(state).save(temporary)


class MLflow(Callback):
    """Logs each number of a round as a metric of one run of MLflow.

    A run that is resumed goes on in the latest run of its name in the experiment.

    Args:
        run_name: of the run there.
        experiment: made if it is not there.
        tracking_uri: of a server, as "http://localhost:5000", or of a file, as
            "sqlite:///mlflow.db"; None: as MLflow is configured, by default that file.
            A folder, "file:///runs", takes MLFLOW_ALLOW_FILE_STORE=true in the
            environment.

    Raises:
        UserError: mlflow is not installed; mlflow-skinny with alembic and sqlalchemy,
            as the extra brings them, is enough.
        ConfigError: MLflow cannot keep runs at `tracking_uri`.
    """

    def __init__(
        self,
        run_name: str,
        experiment: str = "Default",
        tracking_uri: str | None = None,
    ) -> None:
        mlflow = import_extra("mlflow", "mlflow", "callbacks.MLflow")
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
        # MLflow's filter has no escape for quotes: a name with both kinds is looked for
        # among the latest 1,000 runs.
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
    """Return a client of a place for runs."""
    try:
        return mlflow.MlflowClient(tracking_uri)
    except mlflow.MlflowException as error:
        where = mlflow.get_tracking_uri() if tracking_uri is None else tracking_uri
        raise errors.ConfigError(
            f"Expected a place where MLflow can keep runs, found `{where}`"
            f" ({errors.describe(str(error))}): pass the `tracking_uri` of a server,"
            ' such as "http://localhost:5000", or "sqlite:///mlflow.db", which takes'
            ' pip install "ray-fed[mlflow]"; a folder takes'
            " MLFLOW_ALLOW_FILE_STORE=true in the environment."
        ) from error


class TensorBoard(Callback):
    """Writes each number of a round as a scalar to a folder of TensorBoard's.

    A resumed run has TensorBoard drop what was logged after the round it goes on from.

    Args:
        log_dir: the folder.

    Raises:
        UserError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        extra = "tensorboard", "callbacks.TensorBoard"
        self._writers: Any = import_extra(
            "tensorboard.summary.writer.event_file_writer", *extra
        )
        self._events: Any = import_extra("tensorboard.compat.proto.event_pb2", *extra)
        self._summaries: Any = import_extra(
            "tensorboard.compat.proto.summary_pb2", *extra
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
        project: of the run there.
        run_id: of the run; one that is resumed goes on under the same id.
        mode: "online", or "offline" to sync later; None: as wandb is configured.
        folder: for wandb's files; None: the working directory.

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
        self._wandb = import_extra("wandb", "wandb", "callbacks.WandB")
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
        # A step that was logged before a kill is told again: by its own axis it counts.
        self._run.define_metric("*", step_metric="round")

    @override
    def on_round(self, record: RoundRecord) -> None:
        self._run.log({"round": record.round, **record.numbers()})

    @override
    def on_end(self, history: History, reason: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if reason == "failed" else 0)
