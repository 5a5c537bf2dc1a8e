"""Metrics for MLflow."""

from typing import Any

from typing_extensions import override

import ray_fed.errors as errors
from ray_fed.learning.callbacks.hooks import Callback
from ray_fed.learning.extras import import_extra
from ray_fed.learning.history import History, RoundRecord


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
