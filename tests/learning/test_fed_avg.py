from collections.abc import Callable
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest

from ray_fed.learning import (
    LearningProcess,
    Model,
    ModelWeights,
    build_fed_avg,
    build_fed_sgd,
)
from tests.learning import references

BatchMaker = Callable[..., list[Any]]

RATE = 0.05


def sum_of_losses(weights: Any, batches: list[Any]) -> float:
    """Of all examples, each batch measured before its step of local SGD."""
    total = 0.0
    for batch in batches:
        total += references.loss(weights, [batch]) * references.count([batch])
        weights = references.descend(weights, [batch], RATE)
    return total


def mean_delta(weights: Any, clients: list[list[Any]]) -> Any:
    """The average of how far clients move, weighted by their examples."""
    start = references.as_doubles(weights)
    trained = [references.descend(start, batches, RATE) for batches in clients]
    sizes = [float(references.count(batches)) for batches in clients]
    return references.less(references.average(trained, sizes), start)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([[4, 4], [2], [7, 7, 3]], id="three of different sizes"),
        pytest.param([[1], [], [9, 9]], id="one without examples, one outweighs"),
    ],
)
def test_round_equals_the_average_by_hand(
    averaging: LearningProcess, make_batches: BatchMaker, sizes: list[list[int]]
) -> None:
    clients = [make_batches(size, seed) for seed, size in enumerate(sizes)]
    before = averaging.initialize()

    after, metrics = averaging.next(before, clients)

    start = before.weights.trainable
    losses = [sum_of_losses(start, batches) for batches in clients]
    examples = sum(map(references.count, clients))
    for weight, initial, delta in zip(
        after.weights.trainable, start, mean_delta(start, clients), strict=True
    ):
        np.testing.assert_allclose(weight, initial + delta, rtol=2e-6)
    assert after.round_index == 1
    assert metrics["num_examples"] == examples
    np.testing.assert_allclose(metrics["loss"], sum(losses) / examples, rtol=1e-5)
    assert list(metrics) == ["loss", "num_examples", "mae"]


def test_state_is_a_named_tuple_of_the_models_arrays(
    averaging: LearningProcess, linear_model: Model
) -> None:

    found = averaging.initialize()

    assert isinstance(found.weights, ModelWeights)
    kernel, bias = found.weights.trainable
    assert isinstance(kernel, np.ndarray)
    np.testing.assert_array_equal(kernel, [[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(bias, [0.5])
    assert found.round_index == 0
    state = averaging.initialize.type_signature.result
    assert state.placement is fl.SERVER
    assert str(averaging.next.type_signature.result[1]) == (
        "<loss=float32,num_examples=int64,mae=float32>@SERVER"
    )
    averaging.next.type_signature.parameter[0].check_assignable_from(state)
    averaging.next.type_signature.parameter[1].check_assignable_from(
        linear_model.data_type
    )


def test_server_adam_equals_keras_adam(
    linear_model: Model, make_batches: BatchMaker
) -> None:
    clients = [make_batches([4, 4], 0), make_batches([3], 1)]
    adam = keras.optimizers.Adam(0.1)
    process = build_fed_avg(linear_model, keras.optimizers.SGD(RATE), adam)
    state = process.initialize()
    variables = [keras.Variable(weight) for weight in state.weights.trainable]

    for _ in range(3):
        delta = mean_delta([variable.numpy() for variable in variables], clients)
        adam.apply([-part.astype(np.float32) for part in delta], variables)
        state, _ = process.next(state, clients)

    for weight, variable in zip(state.weights.trainable, variables, strict=True):
        np.testing.assert_allclose(weight, variable.numpy(), rtol=1e-5)
    assert state.server[0] == 3
    assert len(state.server) == 6


def test_client_optimizer_starts_afresh_in_each_round(
    linear_model: Model, make_batches: BatchMaker
) -> None:
    clients = [make_batches([4], 0)]
    process = build_fed_avg(linear_model, keras.optimizers.Adam(0.1))
    state = process.initialize()
    first, _ = process.next(state, clients)

    again, _ = process.next(state, clients)

    np.testing.assert_equal(first.weights.trainable, again.weights.trainable)
    # The first step of Adam is as long as its rate.
    step = first.weights.trainable[0] - state.weights.trainable[0]
    np.testing.assert_allclose(np.abs(step), 0.1, rtol=1e-3)


def test_epochs_are_passes_over_the_same_data(
    linear_model: Model, make_batches: BatchMaker
) -> None:
    once, other = make_batches([4, 2], 0), make_batches([3], 1)
    process = build_fed_avg(linear_model, keras.optimizers.SGD(RATE), epochs=3)
    state = process.initialize()

    after, metrics = process.next(state, [once, other])

    repeated = mean_delta(state.weights.trainable, [once * 3, other * 3])
    for part, moved in enumerate(repeated):
        np.testing.assert_allclose(
            after.weights.trainable[part],
            state.weights.trainable[part] + moved,
            rtol=2e-6,
        )
    assert metrics["num_examples"] == 3 * 9


def label(batches: list[Any]) -> list[Any]:
    return [
        {"x": batch["x"], "y": (batch["y"][:, 0] > 0).astype(np.int32)}
        for batch in batches
    ]


@pytest.mark.parametrize(
    "build", [build_fed_avg, pytest.param(build_fed_sgd, marks=pytest.mark.slow)]
)
def test_statistics_of_batch_normalization_are_averaged(
    make_batches: BatchMaker, build: Callable[..., LearningProcess]
) -> None:
    layers = [keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dense(2)]
    model = Model.from_keras(
        keras.Sequential([keras.Input((3,)), *layers]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
    )
    clients = [label(make_batches([6], 0)), label(make_batches([2], 1))]
    process = build(model, keras.optimizers.SGD(RATE))
    state = process.initialize()

    one, _ = process.next(state, clients[:1])

    keras_model = model.to_keras(state)
    keras_model.compile(
        keras.optimizers.SGD(RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    keras_model.train_on_batch(*clients[0][0].values())
    for ours, theirs in zip(
        [*one.weights.trainable, *one.weights.non_trainable],
        [*keras_model.trainable_variables, *keras_model.non_trainable_variables],
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)

    state, _ = process.next(process.initialize(), clients)

    mean, variance = state.weights.non_trainable
    means = [batches[0]["x"].mean(axis=0) for batches in clients]
    variances = [batches[0]["x"].var(axis=0) for batches in clients]
    np.testing.assert_allclose(mean, 0.1 * (6 * means[0] + 2 * means[1]) / 8, rtol=1e-4)
    np.testing.assert_allclose(
        variance,
        0.9 + 0.1 * (6 * variances[0] + 2 * variances[1]) / 8,
        rtol=1e-4,
    )
