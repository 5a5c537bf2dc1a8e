"""What callbacks leave behind: read by the readers of each format."""

import csv
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import unittest.mock
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning import (
    History,
    LearningProcess,
    Model,
    RoundRecord,
    callbacks,
    run,
)
from ray_fed.learning.callbacks import Callback
from tests.learning.counting import CLIENTS, build_tally


def record(index: int, loss: float, accuracy: float | None = None) -> RoundRecord:
    evaluation = None if accuracy is None else {"accuracy": np.float32(accuracy)}
    return RoundRecord(index, (0, 2), {"loss": np.float32(loss)}, evaluation, 0.5)


RECORDS = [record(0, 3.0), record(1, 2.0, 0.25), record(2, 1.5), record(3, 1.0, 0.75)]


def tell(callback: Callback, start: int, end: int = len(RECORDS)) -> None:
    """Tell a callback of a run that is begun, or resumed, at a round."""
    history = History(RECORDS[:start])
    callback.on_start(history)
    for each in RECORDS[start:end]:
        history = history.with_round(each)
        callback.on_round(each)
    callback.on_end(history, "finished")


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_round_also_after_a_resume(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "rounds.csv"
    tell(callbacks.CSV(path), 0, 3)
    before = read_csv(path)
    tell(callbacks.CSV(path), 2)  # round 2 was told, and not saved

    rows = read_csv(path)
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["evaluation.accuracy"] for row in rows] == ["", "0.25", "", "0.75"]
    assert rows[:3] == before
    assert [float(row["training.loss"]) for row in rows] == [3.0, 2.0, 1.5, 1.0]


def test_json_lines_have_an_object_a_round(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rounds.jsonl"
    tell(callbacks.JSONLines(path), 0, 3)
    tell(callbacks.JSONLines(path), 2)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert rows[3] == {
        "round": 4,
        "clients": 2,
        "dropped": 0,
        "retries": 0,
        "seconds": 0.5,
        "bytes_sent": None,
        "bytes_returned": None,
        "bytes_read": 0,
        "training.loss": 1.0,
        "evaluation.accuracy": 0.75,
    }


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_number_that_json_lacks_is_null(tmp_path: pathlib.Path, loss: float) -> None:
    path = tmp_path / "rounds.jsonl"
    callback = callbacks.JSONLines(path)
    callback.on_start(History([record(0, loss)]))

    callback.on_round(record(1, loss))

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["training.loss"] for row in rows] == [None, None]
    assert "NaN" not in path.read_text()


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (callbacks.CSV, "file/rounds.keras"),
        (callbacks.JSONLines, "folder.keras"),
        (callbacks.ModelCheckpoint, "file/rounds.keras"),
        (callbacks.ModelCheckpoint, "folder.keras"),
    ],
)
def test_file_that_cannot_be_written_is_told_before_the_first_round(
    tmp_path: pathlib.Path, linear_model: Model, kind: Any, place: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.keras" / "full").mkdir(parents=True)
    path = tmp_path / place
    takes_model = kind is callbacks.ModelCheckpoint
    callback = kind(path, linear_model) if takes_model else kind(path)

    def evaluate(_: Any) -> Any:
        pytest.fail("a round ran")

    arguments: Any = {"evaluate": evaluate, "callbacks": [callback]}
    with pytest.raises(errors.CallbackError, match=kind.__name__) as told:
        run(build_tally(), CLIENTS, num_rounds=1, **arguments)
    assert f"StorageError: Expected to write the file `{path}`" in str(told.value)
    assert re.search(r"\.\.|\.tmp", str(told.value)) is None


# What reads it imports TensorFlow's stand-ins, and pkg_resources.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensorboard_reads_each_round_once_also_after_a_resume(
    tmp_path: pathlib.Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(callbacks.TensorBoard(tmp_path), 0, 3)
    tell(callbacks.TensorBoard(tmp_path), 2)

    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    losses = accumulator.Scalars("training/loss")
    accuracies = accumulator.Scalars("evaluation/accuracy")
    assert [(e.step, e.value) for e in losses] == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.5),
        (4, 1.0),
    ]
    assert [(e.step, e.value) for e in accuracies] == [(2, 0.25), (4, 0.75)]


_TRACKERS = """
import os, sys
import ray_fed.errors as errors
from ray_fed.learning import callbacks
from tests.learning.test_callbacks import tell
import mlflow
folder = sys.argv[1]
for place in (f"file://{folder}/runs", f"what://{folder}"):
    try:
        callbacks.MLflow("digits", "tests", place)
    except errors.ConfigError as error:
        told = f"found `{place}`", "MLFLOW_ALLOW_FILE_STORE=true"
        print(*(words in str(error) for words in told))
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
for name, tests, place in (
    ("digits", "tests", f"sqlite:///{folder}/runs.db"),
    ("Bob's digits", "other tests", f"sqlite:///{folder}/runs.db"),
    ("Bob's \\"digits\\"", "tests", f"file://{folder}/runs"),
):
    tell(callbacks.MLflow(name, tests, place), 0, 3)
    tell(callbacks.MLflow(name, tests, place), 2)
    client = mlflow.MlflowClient(place)
    experiment = client.get_experiment_by_name(tests)
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "training.loss")
    print(found.info.status, sorted({m.step: m.value for m in history}.items()))
tell(callbacks.WandB("tests", "digits-1", "offline", folder), 0)
"""


@pytest.mark.slow
def test_mlflow_and_wandb_have_the_rounds_once(tmp_path: pathlib.Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _TRACKERS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"MLFLOW_ALLOW_FILE_STORE": "false", "WANDB_SILENT": "true"},
    )

    assert finished.returncode == 0, finished.stderr
    history = "FINISHED [(1, 3.0), (2, 2.0), (3, 1.5), (4, 1.0)]"
    assert finished.stdout.splitlines()[-5:] == ["True True"] * 2 + [history] * 3
    (file,) = tmp_path.glob("wandb/offline-run-*-digits-1/*.wandb")
    content = file.read_bytes()
    assert b"training.loss" in content
    assert b"evaluation.accuracy" in content


def test_trackers_count_rounds_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = unittest.mock.MagicMock()
    tracker.MlflowException = Exception

    def give(*_: object) -> Any:
        return tracker

    monkeypatch.setattr(callbacks, "import_extra", give)
    tell(callbacks.MLflow("a"), 0)
    tell(callbacks.WandB("a", "b"), 0)

    logged = tracker.MlflowClient().log_metric.call_args_list
    assert sorted({call.kwargs["step"] for call in logged}) == [1, 2, 3, 4]
    logged = tracker.init().log.call_args_list
    assert [call.args[0]["round"] for call in logged] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_model_of_the_best_round_is_kept(
    tmp_path: pathlib.Path,
    averaging: LearningProcess,
    linear_model: Model,
    make_batches: Callable[..., list[Any]],
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(2)]
    scores = iter([0.5, 0.9, 0.7])
    seen: list[Any] = []

    def evaluate(state: Any) -> dict[str, float]:
        seen.append(np.asarray(state.weights.trainable[0]))
        return {"accuracy": next(scores)}

    path = tmp_path / "best.keras"
    checkpoint = callbacks.ModelCheckpoint(path, linear_model, "accuracy")
    run(averaging, clients, num_rounds=3, evaluate=evaluate, callbacks=[checkpoint])

    kept: Any = keras.saving.load_model(path)
    np.testing.assert_array_equal(kept.trainable_variables[0].numpy(), seen[1])
    assert [p.name for p in tmp_path.iterdir()] == ["best.keras"]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_early_stopping_returns_the_best_weights_also_after_a_resume(
    tmp_path: pathlib.Path,
    averaging: LearningProcess,
    make_batches: Callable[..., list[Any]],
) -> None:
    clients = [make_batches([3, 2], seed) for seed in range(2)]
    scores = iter([0.5, 0.9, 0.7, 0.6, 0.95])
    seen: list[Any] = []

    def evaluate(state: Any) -> dict[str, float]:
        seen.append(np.asarray(state.weights.trainable[0]))
        return {"accuracy": next(scores)}

    def run_for(num_rounds: int, place: pathlib.Path | None) -> Any:
        stopping = callbacks.EarlyStopping(
            "accuracy", patience=2, best_weights=tmp_path / "best.npz"
        )
        return run(
            averaging, clients, num_rounds=num_rounds, evaluate=evaluate,
            callbacks=[stopping], storage_path=place,
        )  # fmt: skip

    run_for(3, tmp_path / "run")
    result = run_for(9, tmp_path / "run")

    assert result.reason == "stopped early"
    assert result.state.round_index == len(result.history) == 4
    np.testing.assert_array_equal(result.state.weights.trainable[0], seen[1])
    run_for(1, None)
    with pytest.raises(errors.CallbackError, match=r"of round 2 in .*those of round 1"):
        run_for(9, tmp_path / "run")


def test_best_round_is_a_number(linear_model: Model) -> None:
    checkpoint = callbacks.ModelCheckpoint("a.keras", linear_model, "loss")
    checkpoint.on_start(History())
    needed: list[bool] = []
    for index, loss in enumerate([math.nan, 3.0, 3.0, math.nan, 2.0]):
        checkpoint.on_round(record(index, loss))
        needed.append(checkpoint.needs_state(record(index, loss)))

    assert needed == [False, True, False, False, True]


def test_model_is_saved_as_keras_alone(linear_model: Model) -> None:
    with pytest.raises(errors.ConfigError, match=r"ends with \.keras"):
        callbacks.ModelCheckpoint("a.h5", linear_model)


@pytest.mark.parametrize(
    ("module", "package", "make"),
    [
        (
            "tensorboard.summary.writer.event_file_writer",
            "tensorboard",
            lambda: callbacks.TensorBoard("logs"),
        ),
        ("mlflow", "mlflow-skinny", lambda: callbacks.MLflow("a")),
        ("wandb", "wandb", lambda: callbacks.WandB("a", "b")),
    ],
    ids=["tensorboard", "mlflow", "wandb"],
)
def test_missing_library_is_told_where_a_callback_is_made(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, make: Callable[[], Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(errors.UserError, match=f"pip install {package}"):
        make()
