"""Graphs in memory and in the cache folder, and processes that differ in numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
from ray_fed import learning
from ray_fed import tensorflow as rtf
from ray_fed.tensorflow.graphs import kept_graphs
from ray_fed.tensorflow.kernels import server_kernels
from ray_fed.tensorflow.kernels.graph_builder import GraphImporter
from ray_fed.values.lru_cache import LruCache

KEY = "0123abcd"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_FED_GRAPH_CACHE", str(tmp_path))
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep nothing in memory, as in a new process."""
    monkeypatch.setattr(kept_graphs, "_memory", LruCache[str, bytes](8))


def model(loss: Any = "mse") -> learning.Model:
    keras.utils.clear_session()  # which counts names
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)]
    return learning.Model.from_keras(keras.Sequential(layers), loss=loss)


def data() -> list[Any]:
    generator = np.random.default_rng(0)
    rows = {"x": generator.normal(size=(5, 4)), "y": generator.normal(size=(5, 3))}
    return [[{k: v.astype(np.float32) for k, v in rows.items()}] * 2] * 20


def run(process: learning.LearningProcess) -> list[bytes]:
    """Return the weights after a round, and what clients keep."""
    kept = process.initial_client_state
    given = [data()] if kept is None else [[kept] * 20, data()]
    with ray_fed.create_context(ray_fed.Config(backend="local", workers=1)) as context:
        state = context.invoke(process.initialize)
        new, *others = context.invoke(process.next, (state, *given))
    weights = [new.weights.trainable, others[: len(given) - 1]]
    return [np.asarray(weight).tobytes() for weight in tf.nest.flatten(weights)]


def test_find_returns_what_another_process_put(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_graphs.put(KEY, ["note"], b"content")
    forget(monkeypatch)

    assert kept_graphs.find(KEY) == (["note"], b"content")
    assert [path.name for path in folder.glob("*/*")] == [KEY]


def test_find_takes_a_damaged_file_for_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_graphs.put(KEY, ["note"], b"content")
    forget(monkeypatch)
    (file,) = folder.glob("*/*")
    file.write_bytes(file.read_bytes()[:-1])

    assert kept_graphs.find(KEY) is None


def test_put_removes_the_files_used_the_longest_ago(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_graphs, "_FOLDER_BYTES", 250)
    for key in "abc":
        kept_graphs.put(key, [], b"x" * 100)

    assert len(list(folder.glob("*/*"))) == 1


def test_off_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_FED_GRAPH_CACHE", "off")
    kept_graphs.put(KEY, ["note"], b"content")

    assert kept_graphs.find(KEY) is None


BUILDERS: dict[str, Callable[[learning.Model, float], learning.LearningProcess]] = {
    "client rate": lambda m, r: learning.build_fed_avg(m, keras.optimizers.SGD(r)),
    "proximal": lambda m, r: learning.build_fed_prox(m, "sgd", proximal=r),
    "ditto": lambda m, r: learning.build_ditto(m, "sgd", proximal=r),
    "SCAFFOLD": lambda m, r: learning.build_scaffold(m, r, num_clients=20),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.usefixtures("folder")
def test_processes_that_differ_in_a_number_share_trace_and_kernel(
    build: Callable[[learning.Model, float], learning.LearningProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_kernels, "_shared", LruCache[bytes, Any](64))
    trained = model()
    traces: list[object] = []
    find_gradients = learning.Model.find_gradients

    def counted(self: learning.Model, *args: Any, **kwargs: Any) -> Any:
        traces.append(self)
        return find_gradients(self, *args, **kwargs)

    monkeypatch.setattr(learning.Model, "find_gradients", counted)
    first = build(trained, 0.1)
    of_first, count, kernels = run(first), len(traces), kernel_keys()
    second = build(trained, 0.2)
    of_second = run(second)

    assert (len(traces), kernel_keys()) == (count, kernels)
    assert rtf.identify_computation(first.next) != rtf.identify_computation(second.next)
    monkeypatch.setenv("RAY_FED_GRAPH_CACHE", "off")
    assert of_first == run(build(trained, 0.1))
    assert of_second == run(build(trained, 0.2)) != of_first


@pytest.mark.usefixtures("folder")
def test_second_process_builds_no_kernel_from_computations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_kernels, "_shared", LruCache[bytes, Any](64))
    of_first = run(learning.build_fed_avg(model(), "adam"))
    calls: list[object] = []
    call = GraphImporter.call

    def counted(self: GraphImporter, *args: Any) -> Any:
        calls.append(self)
        return call(self, *args)

    monkeypatch.setattr(GraphImporter, "call", counted)
    forget(monkeypatch)
    monkeypatch.setattr(server_kernels, "_shared", LruCache[bytes, Any](64))
    of_second = run(learning.build_fed_avg(model(), "adam"))

    assert of_second == of_first
    # The merge of two sums is built anew: it is one op for each tensor.
    assert len({id(importer) for importer in calls}) <= 1


def kernel_keys() -> list[bytes]:
    """Return the keys of kernels of clients that threads share."""
    return [key for key, _ in server_kernels._shared.items() if b"clients" in key]  # pyright: ignore[reportPrivateUsage]


def test_model_with_another_setting_is_traced(folder: Path) -> None:
    trained = model()
    learning.build_fed_avg(trained, "sgd")
    before = len(list(folder.glob("*/*")))
    trained._keras.layers[-1].rate = 0.1  # pyright: ignore[reportPrivateUsage]

    learning.build_fed_avg(trained, "sgd")

    assert len(list(folder.glob("*/*"))) > before


@pytest.mark.usefixtures("folder")
def test_settings_that_no_config_of_keras_has_are_told_apart() -> None:
    losses = [keras.losses.Huber(delta=delta) for delta in (0.1, 1.0)]
    assert losses[0].get_config() == losses[1].get_config()

    found = [run(learning.build_fed_avg(model(loss), "sgd")) for loss in losses]

    assert found[0] != found[1]
