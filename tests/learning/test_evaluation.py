from typing import Any

import keras
import numpy as np
import pytest

from ray_fed.learning import Model, build_fed_avg, build_fed_eval


def build_model() -> tuple[keras.Model, Model]:
    keras.utils.set_random_seed(5)
    keras_model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
    keras_model.compile(loss=loss, metrics=metrics)
    return keras_model, Model.from_keras(keras_model, loss=loss, metrics=metrics)


def make_examples(size: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(size)
    x = generator.normal(size=(size, 4)).astype(np.float32)
    return x, generator.integers(0, 3, size).astype(np.int32)


def cut(x: Any, y: Any, sizes: list[int]) -> list[Any]:
    ends = np.cumsum(sizes)
    return [
        {"x": x[end - size : end], "y": y[end - size : end]}
        for size, end in zip(sizes, ends, strict=True)
    ]


@pytest.mark.parametrize(
    "clients",
    [
        pytest.param([[37]], id="one client, one batch"),
        pytest.param([[8, 8, 8, 8, 5]], id="one client, a short last batch"),
        pytest.param([[1, 10], [20], [], [6]], id="four clients, one without examples"),
    ],
)
def test_evaluation_equals_that_of_keras(clients: list[list[int]]) -> None:
    keras_model, model = build_model()
    x, y = make_examples(37)
    batches = iter(cut(x, y, [size for sizes in clients for size in sizes]))
    data = [[next(batches) for _ in sizes] for sizes in clients]
    evaluation = build_fed_eval(model)

    metrics = evaluation.next(evaluation.initialize(), data)

    evaluate: Any = keras_model.evaluate
    expected = evaluate(x, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], expected["accuracy"], rtol=1e-6)
    assert metrics["num_examples"] == 37


def test_evaluation_takes_the_state_of_a_training() -> None:
    _, model = build_model()
    x, y = make_examples(20)
    data = [cut(x, y, [10, 10])]
    training = build_fed_avg(model, keras.optimizers.SGD(0.1))
    state, _ = training.next(training.initialize(), data)

    of_state = build_fed_eval(model, training).next(state, data)
    of_weights = build_fed_eval(model).next(state.weights, data)

    assert of_state == of_weights
    trained = model.to_keras(state)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(of_state["loss"], loss(y, trained(x)), rtol=1e-5)


def test_evaluation_over_no_examples_has_no_loss() -> None:
    _, model = build_model()
    evaluation = build_fed_eval(model)

    metrics = evaluation.next(evaluation.initialize(), [[]])

    assert metrics["num_examples"] == 0
    assert np.isnan(metrics["loss"])
