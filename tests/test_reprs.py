"""How public objects show themselves: in a line, and as HTML where there is more."""

import dataclasses
import math
import pathlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import tensorflow as tf

import ray_fed
from ray_fed import learning, program
from ray_fed.observability import reprs
from ray_fed.observability.report import RoundReport
from ray_fed.program import ClientData, RayFederatedContext
from tests.observability import subrounds

KERAS = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
MODEL = learning.Model.from_keras(
    KERAS,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
RECORD = learning.RoundRecord(
    3, tuple(range(500)), {"loss": np.float32(0.5)}, None, 0.5, spans=((1,) * 8,) * 99
)


@pytest.fixture
def context() -> Iterator[ray_fed.ExecutionContext]:
    config = ray_fed.Config(backend="local", workers=2)
    with ray_fed.create_context(config) as made:
        yield made


def build_state() -> learning.ServerState:
    weights = learning.ModelWeights((np.ones([99, 99]),), ())
    return learning.ServerState(weights, (), 4)


def build_process() -> learning.LearningProcess:
    return learning.build_fed_avg(MODEL, keras.optimizers.SGD(0.1))


CLIENTS = ClientData.from_values({f"client {n}": n for n in range(3000)}, np.int32)
SOURCE = program.ClientDataSource(CLIENTS, program.WeightedSampler([1.0] * 3000))


TRIAL = learning.Trial({"rate": 0.1}, 0, learning.History([RECORD] * 9), "finished")
TOTALS = learning.Totals(0.5, 2, (), ())

MAKE: dict[str, Callable[[], Any]] = {
    "Buffered": lambda: learning.Buffered(8, 2),
    "CSV": lambda: learning.callbacks.CSV("rounds.csv"),
    "Callback": learning.callbacks.Callback,
    "ClientData": lambda: CLIENTS,
    "ClientDataIterator": SOURCE.iterator,
    "ClientDataSource": lambda: SOURCE,
    "ClientMetrics": lambda: program.ClientMetrics(1, {"loss": 0.5}),
    "ClientReference": lambda: CLIENTS[0],
    "ClientStates": lambda: learning.ClientStates([np.zeros(99)]),
    "Config": lambda: ray_fed.Config(backend="local", workers=2),
    "Data": ray_fed.Data,
    "Delta": lambda: learning.Delta((), ()),
    "EarlyStopping": lambda: learning.EarlyStopping("loss"),
    "FileProgramStateManager": lambda: program.FileProgramStateManager("a" * 999),
    "ForwardPass": lambda: learning.ForwardPass(
        1.0, build_state().weights, False, TOTALS
    ),
    "FullGradient": lambda: learning.FullGradient((), (), TOTALS),
    "Guards": learning.Guards,
    "History": lambda: learning.History([RECORD] * 99),
    "Kernels": ray_fed.Kernels,
    "JSONLines": lambda: learning.callbacks.JSONLines("rounds.jsonl"),
    "LearningProcess": build_process,
    "LocalTraining": lambda: learning.LocalTraining(MODEL, "sgd", epochs=2),
    "Model": lambda: MODEL,
    "ModelCheckpoint": lambda: learning.callbacks.ModelCheckpoint("a.keras", MODEL),
    "ModelWeights": lambda: build_state().weights,
    "PoissonSampler": lambda: program.PoissonSampler(0.5),
    "OortSampler": program.OortSampler,
    "PowerOfChoiceSampler": lambda: program.PowerOfChoiceSampler(8),
    "Retry": lambda: ray_fed.Retry(crash=1),
    "RoundRecord": lambda: RECORD,
    "RoundReport": lambda: RoundReport(
        round_index=2,
        num_clients=99,
        num_leaves=9,
        subrounds=(subrounds.reported(),) * 9,
        seconds=2.0,
    ),
    "ServerState": build_state,
    "ServerView": lambda: learning.ServerView(build_state().weights, (), 4),
    "Stragglers": ray_fed.Stragglers,
    "Subrounds": lambda: ray_fed.Subrounds(count=3),
    "SweepResult": lambda: learning.SweepResult((TRIAL,) * 99, ["rate"]),
    "TensorBoard": lambda: learning.callbacks.TensorBoard("logs"),
    "Synchronous": learning.Synchronous,
    "Totals": lambda: TOTALS,
    "Trained": lambda: learning.Trained(build_state().weights, TOTALS, (), 1),
    "TrainingResult": lambda: learning.TrainingResult(
        learning.History([RECORD]), build_state(), "finished"
    ),
    "Trial": lambda: TRIAL,
    "UniformSampler": program.UniformSampler,
    "Workers": lambda: ray_fed.Workers(count=2),
}


def draw(shown: Any) -> str:
    """Return what a notebook shows."""
    return shown._repr_html_()


LOOKED_AT_ELSEWHERE = {
    "AdaptiveSampler",  # a protocol
    "AvailabilitySampler",  # has all its hours: a saved run compares the text
    "ExecutionContext",
    "MLflow",
    "RayFederatedContext",
    "RayValueReference",
    "Sampler",
    "WandB",
    "WeightedSampler",  # has all its weights, likewise
}

SHOWN_AS_HTML = (
    "ClientData",
    "Config",
    "History",
    "LearningProcess",
    "RoundRecord",
    "RoundReport",
    "TrainingResult",
)


def public_classes() -> list[str]:
    found = {
        name: getattr(module, name)
        for module in (ray_fed, learning, learning.callbacks, program)
        for name in module.__all__
    }
    return sorted(name for name, each in found.items() if isinstance(each, type))


def test_all_public_classes_are_looked_at() -> None:
    assert {*MAKE, *LOOKED_AT_ELSEWHERE} == set(public_classes())


def test_texts_are_short_lines() -> None:
    for name, make in MAKE.items():
        text = repr(make())

        assert len(text) < 300, name
        assert "\n" not in text, name
        assert " object at 0x" not in text, name


def test_html_is_a_table_that_scrolls_where_it_is_wide() -> None:
    for name in SHOWN_AS_HTML:
        drawn = draw(MAKE[name]())

        assert drawn.count("<table>") == drawn.count("</table>") == 1, name
        assert drawn.count("<") == drawn.count(">"), name
        scrolls = drawn.startswith("<div style='overflow-x:auto")
        assert scrolls or name not in ("History", "RoundRecord", "RoundReport")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (2600, "2.600 kB"), (12_345_678, "12.35 MB")],
)
def test_sizes_are_in_units(count: int, text: str) -> None:
    assert reprs.show_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.20411427399994864, "0.2041"),
        (1e-6, "1.000e-06"),
        (0.5, "0.5000"),
        (12.3456, "12.35"),
        (999.96, "1,000"),
        (12345.678, "12,346"),
        (0.0, "0"),
        (1797.0, "1,797"),
        (2**40, "1,099,511,627,776"),
        (-0.000123456, "-0.0001235"),
        (1e30, "1.000e+30"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
    ids=str,
)
def test_numbers_have_four_digits_that_matter(value: float, text: str) -> None:
    assert reprs.show_number(value) == text


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (
            program.FileProgramStateManager("states"),
            "<program state in states/program_state_*, the last 5 of its versions>",
        ),
        (
            program.FileProgramStateManager("memory://a", "round_", keep_total=0),
            "<program state in memory://a/round_*, all of its versions>",
        ),
        (learning.callbacks.CSV("rounds.csv"), "CSV('rounds.csv')"),
        (learning.callbacks.Callback(), "<callback Callback>"),
    ],
    ids=["some versions", "all versions", "file", "hooks"],
)
def test_text_says_where_it_writes(shown: Any, text: str) -> None:
    assert repr(shown) == text


def test_trackers_show_their_run_and_no_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "ray_fed.learning.callbacks.import_extra"
    monkeypatch.setattr(path, unittest.mock.MagicMock())
    mlflow = learning.callbacks.MLflow("a", tracking_uri="http://user:secret@host")

    assert repr(mlflow) == "MLflow('a', experiment='Default')"
    assert repr(learning.callbacks.WandB("a", "b")) == "WandB('a', run_id='b')"


def test_settings_show_what_differs_from_the_defaults() -> None:
    config = ray_fed.Config(backend="local", workers=2)

    assert repr(config) == "Config(backend='local', workers=Workers(count=2))"
    assert repr(ray_fed.Config()) == "Config()"
    assert "nothing" in draw(ray_fed.Config())
    assert "<td>backend</td>" in draw(config)


def test_context_shows_backend_workers_calls_and_seconds(
    context: ray_fed.ExecutionContext,
) -> None:
    text = "backend local, workers 2, calls 0, seconds 0, state open"

    assert repr(context) == f"<ray_fed context: {text}>"
    assert "<td style='text-align:left'>local</td>" in draw(context)
    with RayFederatedContext(context) as over:
        assert repr(over) == f"<references over {context!r}>"


@pytest.mark.ray
def test_context_on_ray_shows_which_ray_it_is_on(ray_contexts: Any) -> None:
    context = ray_contexts(workers=2)
    here = ray.get_runtime_context().gcs_address

    assert f"backend ray (joined the Ray at {here}), workers 2," in repr(context)
    assert f"ray (joined the Ray at {here})" in draw(context)


def test_clients_show_their_count_and_type_not_their_ids() -> None:
    assert repr(CLIENTS) == "<3,000 clients of int32>"
    assert "3,000" in draw(CLIENTS)
    assert len(draw(CLIENTS)) < 1000


def test_clients_of_a_table_show_rows_and_columns() -> None:
    rows = pa.table(
        {
            "nr": [n // 4 for n in range(40)],
            "exper": np.arange(40, dtype=np.int32),
            "job": ["a", None] * 20,
            "wage": np.linspace(0, 1, 40),
        }
    )
    named = {"exper": "exper", "job": "job"}
    clients = ClientData.from_table(
        rows, client="nr", x=named, y="wage", missing="keep"
    )

    columns = "columns exper int32, job str, wage float64"
    assert repr(clients) == f"<10 clients, 40 rows, {columns}>"
    assert repr(clients.epochs(3).batch(2)[:4]) == f"<4 clients, 16 rows, {columns}>"
    trained, held = clients.hold_out_rows(0.25)
    assert repr(trained) == f"<10 clients, 30 rows, {columns}>"
    assert repr(held) == f"<10 clients, 10 rows, {columns}>"
    assert "exper int32, job str, wage float64" in draw(clients)
    mapped = ClientData.from_table(rows, client="nr", x="exper").map(lambda row: row)
    assert repr(mapped) == "<10 clients, 40 rows of <x=int32>*>"


def test_rows_that_are_dropped_as_they_are_read_are_counted_as_such(
    tmp_path: pathlib.Path,
) -> None:
    table = pa.table({"nr": [1, 1, 2], "x": [0.5, None, 1.5]})
    pq.write_table(table, tmp_path / "rows.parquet")

    dropped, refused = (
        ClientData.from_parquet(tmp_path, client="nr", x="x", missing=missing)
        for missing in ("drop", "refuse")
    )

    assert repr(dropped) == "<2 clients, at most 3 rows, columns x float64>"
    assert repr(refused) == "<2 clients, 3 rows, columns x float64>"
    other = ClientData.from_table({"nr": [3], "x": [0.5]}, client="nr", x="x")
    for data in (other.concat(dropped), dropped.concat(other)):
        assert repr(data) == "<3 clients, at most 4 rows, columns x float64>"


def test_process_shows_algorithm_model_optimizers_and_state() -> None:
    adam = keras.optimizers.Adam(0.01)
    fed_prox = learning.build_fed_prox(MODEL, "sgd", adam, proximal=0.5, epochs=2)
    evaluation = learning.build_fed_eval(MODEL, fed_prox)

    model = f"model `{KERAS.name}` of 15 parameters"
    assert repr(fed_prox) == (
        "<learning process: algorithm FedProx(0.5), client optimizer SGD(0.01), server"
        f" optimizer Adam(0.01), epochs 2, {model}, state 196 bytes>"
    )
    assert repr(evaluation) == f"<learning process: algorithm evaluation, {model}>"
    assert "<td style='text-align:left'>Adam(0.01)</td>" in draw(fed_prox)


def test_size_of_a_state_is_that_of_its_arrays() -> None:
    process = build_process()
    context = ray_fed.create_context(ray_fed.Config(backend="local"))
    with context:
        state = context.invoke(process.initialize, None)

    arrays: list[Any] = tf.nest.flatten(state)
    num_bytes = sum(np.asarray(array).nbytes for array in arrays)
    assert process.facts["state"] == reprs.show_bytes(num_bytes)


def test_record_keeps_its_fields_apart_from_its_text() -> None:
    assert repr(RECORD) == "<round 4: 500 clients, 0.5000 s, training.loss 0.5000>"
    assert dataclasses.replace(RECORD, seconds=1.0) != RECORD
