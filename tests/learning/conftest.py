"""A context on threads for the tests of learning, and small jobs to learn."""

from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

import ray_fed
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import LearningProcess, Model, build_fed_avg

REGRESSION_LABELS = fl.TensorType(np.float32, [None, 1])


@pytest.fixture(scope="session")
def thread_context() -> Iterator[ExecutionContext]:
    """One context for all tests of learning: it caches what it compiled."""
    config = ray_fed.Config.load(backend="local", workers=2)
    with ray_fed.create_context(config) as context:
        yield context


@pytest.fixture(autouse=True)
def default_context(thread_context: ExecutionContext) -> None:
    """Install it, as the tests above leave none installed."""
    fl.framework.set_default_context(thread_context)


@pytest.fixture(scope="session")
def linear_model() -> Model:
    """Linear regression on three features; weights [1, 2, 3], bias 0.5.

    One for all tests, so that the context knows again what it compiled.
    """
    dense = keras.layers.Dense(1)
    keras_model = keras.Sequential([keras.Input((3,)), dense])
    dense.set_weights([np.array([[1.0], [2.0], [3.0]], "f"), np.array([0.5], "f")])
    return Model.from_keras(
        keras_model,
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.MeanAbsoluteError("mae")],
        label_type=REGRESSION_LABELS,
    )


@pytest.fixture(scope="session")
def averaging(linear_model: Model) -> LearningProcess:
    """Federated averaging of it by SGD at a rate of 0.05: it takes seconds to build."""
    return build_fed_avg(linear_model, keras.optimizers.SGD(0.05))


@pytest.fixture(scope="session")
def make_batches() -> Callable[..., list[Any]]:
    """Return batches of the given sizes for `linear_model`, by a seed."""

    def make(sizes: list[int], seed: int) -> list[Any]:
        generator = np.random.default_rng(seed)
        return [
            {
                "x": generator.normal(size=(size, 3)).astype(np.float32),
                "y": generator.normal(size=(size, 1)).astype(np.float32),
            }
            for size in sizes
        ]

    return make
