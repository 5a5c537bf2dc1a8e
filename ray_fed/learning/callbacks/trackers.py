"""Callbacks that log to trackers of experiments.

Metrics for MLflow.

Metrics for TensorBoard.

Metrics for Weights and Biases.
"""

import os
import time
from typing import Any, Literal

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.files.opening import expand_home
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.checks import import_extra
from ray_fed.learning.history import History, RoundRecord
from ray_fed.observability import reprs


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
        named = f"attributes.run_name = '{self._run_name}'"
        runs = self._client.search_runs([experiment_id], named, max_results=1)
        return runs[0].info.run_id if runs else ""

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
