"""Graphs of what clients train: variables became values, with the same bits."""

# pyright: reportUnknownLambdaType=false

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import ray_fed
from ray_fed import learning
from ray_fed.tensorflow import lowering
from ray_fed.tensorflow.graphs import graph_message
from ray_fed.tensorflow.kernels import server_kernels
from ray_fed.values.lru_cache import LruCache


def readme_process() -> learning.LearningProcess:
    layers = [keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)]
    return learning.build_fed_avg(
        model_of(layers),
        client_optimizer=keras.optimizers.SGD(0.5),
        server_optimizer=keras.optimizers.SGD(1.0, momentum=0.8),
        epochs=5,
    )


def normalized_process() -> learning.LearningProcess:
    layers = [
        keras.Input((8, 8)),
        keras.layers.Flatten(),
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(10),
    ]
    optimizer = keras.optimizers.Adam(0.1, use_ema=True)
    return learning.build_fed_avg(model_of(layers), optimizer)


def accumulating_process() -> learning.LearningProcess:
    layers = [keras.Input((8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)]
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return learning.build_fed_prox(model_of(layers), optimizer, proximal=0.1)


def model_of(layers: list[Any]) -> learning.Model:
    keras.utils.set_random_seed(0)
    return learning.Model.from_keras(
        keras.Sequential(layers),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def clients(*sizes: int) -> list[Any]:
    """Return one client of three batches for each size of the last batch."""
    generator = np.random.default_rng(5)
    return [
        [
            {
                "x": generator.normal(size=(size, 8, 8)).astype(np.float32),
                "y": generator.integers(0, 10, size).astype(np.int32),
            }
            for size in (4, 4, last)
        ]
        for last in sizes
    ]


def run_rounds(process: learning.LearningProcess) -> list[Any]:
    """Return the flat state and metrics after two rounds on threads."""
    config = ray_fed.Config(backend="local", workers=1, progress="off")
    with ray_fed.create_context(config) as context:
        state = context.invoke(process.initialize, None)
        state, _ = context.invoke(process.next, (state, clients(1, 2, 3)))
        ended = context.invoke(process.next, (state, clients(1, 2, 3)))
    return [np.asarray(leaf) for leaf in keras.tree.flatten(ended)]


@pytest.fixture
def lowered_ops(monkeypatch: pytest.MonkeyPatch) -> list[collections.Counter[str]]:
    """Count the ops of each graph that is lowered."""
    counted: list[collections.Counter[str]] = []
    lower = lowering.lower

    def spy(*args: Any, **settings: Any) -> Any:
        lowered = lower(*args, **settings)
        assert isinstance(lowered, lowering.Lowered)
        nodes = graph_message.all_nodes(lowered.graph_def)
        counted.append(collections.Counter(n.op for each in nodes for n in each))
        counted[-1]["for XLA"] = not settings.get("isolated", True)
        return lowered

    monkeypatch.setattr(lowering, "lower", spy)
    return counted


@pytest.mark.parametrize(
    "build", [readme_process, normalized_process, accumulating_process]
)
def test_no_variable_is_left_and_the_bits_are_the_same(
    build: Callable[[], learning.LearningProcess],
    lowered_ops: list[collections.Counter[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = build()

    found = run_rounds(process)

    for counted in lowered_ops:
        assert not [op for op in counted if "Variable" in op or "VarHandle" in op]
    assert any(counted["MatMul"] for counted in lowered_ops)
    monkeypatch.setattr(lowering, "_has_values", lambda *_, **__: False)
    monkeypatch.setattr(server_kernels, "_shared", LruCache(64))
    lowered_ops.clear()
    wanted = run_rounds(process)
    assert any(counted["VarHandleOp"] for counted in lowered_ops)
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_xla_compiles_the_program_of_the_readme(
    lowered_ops: list[collections.Counter[str]],
) -> None:
    process, sixteen = readme_process(), clients(*[4] * 16)
    results: list[Any] = []

    for jit in ("auto", "off"):
        config = ray_fed.Config.load(
            backend="local", workers=1, clients_per_leaf=16, kernels={"jit": jit}
        )
        with ray_fed.create_context(config) as context:
            state = context.invoke(process.initialize, None)
            lowered_ops.clear()
            ended = context.invoke(process.next, (state, sixteen))
            report = context.last_report
        assert report is not None
        decisions = [decision.jit for decision in report.jit_decisions]
        assert decisions == ([True] if jit == "auto" else [])
        for_xla = [counted for counted in lowered_ops if counted["for XLA"]]
        assert bool(for_xla) == (jit == "auto")
        assert not any(counted["Assert"] for counted in for_xla)
        results.append([np.asarray(leaf) for leaf in keras.tree.flatten(ended)])

    for value, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)
