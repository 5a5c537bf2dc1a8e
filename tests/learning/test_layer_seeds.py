"""Random layers draw other numbers for each client, round, step, epoch and algorithm.

A loss whose gradient by a kernel is what comes into it shows what layers made of data:
each client and batch has a column of its own, and each epoch a power of two. Clients
have equal data but for the column, and chance is counted: p-values times their number.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from typing_extensions import override

import ray_fed
from ray_fed import learning
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import LearningProcess, Model
from tests.contexts.draw_statistics import WAYS

UNITS = 2048
CLIENTS, BATCHES, ROUNDS = 3, 2, 2
COLUMNS = CLIENTS * BATCHES
LABELS = fl.TensorType(np.float32, [None, COLUMNS])
AXES = ("algorithm", "pass", "round", "client", "batch", "epoch", "layer")
LEAST = 0.001
"""Chance of a failure of a right library, of each p-value times their number; seeds are
fixed, so it is met once."""


class ShowsInput(keras.losses.Loss):
    """Minus the gradient by a kernel is the mean of input times label."""

    @override
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -tf.reduce_sum(y_true * y_pred, -1)


def shows(layers: Sequence[Any], size: int, columns: int) -> tuple[Model, list[int]]:
    """Return a model of layers side by side, each with a kernel of zeros behind it.

    And the places of these kernels among the trainable weights.
    """
    inputs = keras.Input((size,))
    kernels = [
        keras.layers.Dense(columns, use_bias=False, kernel_initializer="zeros")
        for _ in layers
    ]
    outputs = [
        kernel(keras.layers.Flatten()(layer(inputs)))
        for layer, kernel in zip(layers, kernels, strict=True)
    ]
    keras_model = keras.Model(inputs, keras.layers.Add()(outputs))
    model = Model.from_keras(
        keras_model,
        loss=ShowsInput(),
        label_type=fl.TensorType(np.float32, [None, columns]),
    )
    ids = [id(variable) for variable in keras_model.trainable_variables]
    return model, [ids.index(id(kernel.kernel)) for kernel in kernels]


@pytest.fixture(scope="module")
def two_dropouts() -> Model:
    layers = [keras.layers.Dropout(0.5, seed=seed) for seed in range(2)]
    return shows(layers, UNITS, COLUMNS)[0]


def batches_of(client: int) -> list[Any]:
    ones = np.ones((1, UNITS), np.float32)
    columns = np.eye(COLUMNS, dtype=np.float32)
    return [
        {"x": ones, "y": columns[[client * BATCHES + batch]]}
        for batch in range(BATCHES)
    ]


DATA = [batches_of(client) for client in range(CLIENTS)]


def doubling() -> keras.optimizers.Optimizer:
    rate: Any = keras.optimizers.schedules.ExponentialDecay(1, 1, 2.0)
    return keras.optimizers.SGD(rate)


def momentum() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(1.0, momentum=0.5)


ALGORITHMS: dict[str, tuple[int, Callable[[Model], LearningProcess]]] = {
    "fed_avg": (2, lambda m: learning.build_fed_avg(m, doubling(), epochs=2)),
    "fed_prox": (
        2,
        lambda m: learning.build_fed_prox(m, doubling(), proximal=1e-6, epochs=2),
    ),
    "fed_sgd": (1, lambda m: learning.build_fed_sgd(m, keras.optimizers.SGD(1.0))),
    "mime_lite": (1, lambda m: learning.build_mime_lite(m, momentum())),
    "scaffold": (1, lambda m: learning.build_scaffold(m, 1.0, num_clients=CLIENTS)),
}
"""How many epochs its clients train, and how it is built."""


def invoke(process: LearningProcess, state: Any) -> Any:
    """Return the state after a round of all clients."""
    kept = process.initial_client_state
    middle = () if kept is None else ([kept] * CLIENTS,)
    return process.next(state, *middle, DATA)[0]


def bits_of(kernel: Any, epochs: int) -> dict[tuple[Any, ...], Any]:
    """Return what was kept by (client, batch, epoch), of what a kernel moved by."""
    columns = np.asarray(kernel, np.float64).T
    found: dict[tuple[Any, ...], Any] = {}
    for place, column in enumerate(columns):
        # Kept inputs are 2, in steps whose rates are powers of 2^BATCHES.
        least = np.abs(column[column != 0]).min()
        codes = np.rint(np.abs(column) / least).astype(int)
        for epoch in range(epochs):
            key = *divmod(place, BATCHES), epoch
            found[key] = codes >> (epoch * BATCHES) & 1
    return found


def masks_of(model: Model) -> dict[tuple[Any, ...], Any]:
    """Return which units were kept, by what AXES say."""
    masks: dict[tuple[Any, ...], Any] = {}

    def add(name: str, part: str, number: int, kernels: Sequence[Any]) -> None:
        epochs = ALGORITHMS[name][0]
        for layer, kernel in enumerate(kernels):
            for key, mask in bits_of(kernel, epochs).items():
                masks[name, part, number, *key, layer] = mask

    for name, (_, build) in ALGORITHMS.items():
        process = build(model)
        state = process.initialize()
        for number in range(ROUNDS):
            after = invoke(process, state)
            add(name, "training", number, after.weights.trainable)
            if name == "mime_lite":
                shape = (UNITS, COLUMNS)
                moments = [v for v in after.server if np.shape(v) == shape]
                add(name, "gradient", number, moments)
    return masks


def differing(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """Return the axis that two masks differ in; "several" where there are more."""
    axes = [a for a, x, y in zip(AXES, one, other, strict=True) if x != y]
    return axes[0] if len(axes) == 1 else "several"


def p_values(masks: Mapping[tuple[Any, ...], Any]) -> dict[str, tuple[int, float]]:
    """Return for each axis the number of pairs that differ in it, and a p-value.

    It is of the largest agreement or disagreement, times the number of pairs, or of the
    mean of its squares, times two: the smaller one.
    """
    keys = list(masks)
    signs = np.array([masks[key] for key in keys]) * 2.0 - 1
    scores = signs @ signs.T / np.sqrt(UNITS)
    groups = collections.defaultdict[str, list[float]](list)
    for i, j in itertools.combinations(range(len(keys)), 2):
        groups[differing(keys[i], keys[j])].append(scores[i, j])
    groups["share kept"] = list(signs.sum(1) / np.sqrt(UNITS))
    found: dict[str, tuple[int, float]] = {}
    for axis, values in groups.items():
        count, array = len(values), np.array(values)
        largest = 2 * scipy.stats.norm.sf(np.abs(array).max()) * count
        squares = scipy.stats.chi2(count)
        below, above = squares.cdf((array**2).sum()), squares.sf((array**2).sum())
        found[axis] = count, float(min(1, 2 * largest, 4 * below, 4 * above))
    return found


@pytest.mark.slow
def test_masks_are_independent_over_all_that_keys_them(
    two_dropouts: Model, thread_context: ExecutionContext
) -> None:
    thread_context.resume_at(0)

    masks = masks_of(two_dropouts)

    found = p_values(masks)

    assert set(found) == {*AXES, "several", "share kept"}
    assert min(p for _, p in found.values()) * len(found) > LEAST, found


class OwnNoise(keras.layers.Layer):
    """Draws twice from a generator of its own, outside of training, too."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    @override
    def call(self, x: Any) -> Any:
        shape = keras.ops.shape(x)
        first = keras.random.normal(shape, seed=self.generator)
        return x + first * keras.random.uniform(shape, seed=self.generator)


class GlobalNoise(keras.layers.Layer):
    @override
    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x))


class StatefulNoise(keras.layers.Layer):
    @override
    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


class Attention(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.MultiHeadAttention(1, 2, dropout=0.5, seed=2)

    @override
    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x, x, training=training)


def nested(seed: int, *, trainable: bool) -> keras.Model:
    inputs = keras.Input((PIXELS,))
    model = keras.Model(inputs, keras.layers.Dropout(0.5, seed=seed)(inputs))
    model.trainable = trainable
    return model


def shaped(shape: tuple[int, ...], layer: Any) -> Any:
    return keras.Sequential([keras.layers.Reshape(shape), layer])


def image_layer(name: str, **arguments: Any) -> Any:
    return shaped((4, 4, 1), getattr(keras.layers, name)(**arguments))


PIXELS, ROWS = 16, 256


def all_kinds() -> dict[str, Any]:
    return {
        "Dropout": keras.layers.Dropout(0.5, seed=1),
        "noise shape": keras.layers.Dropout(0.5, (None, 1), seed=3),
        "GaussianNoise": keras.layers.GaussianNoise(0.5, seed=4),
        "GaussianDropout": keras.layers.GaussianDropout(0.5, seed=5),
        "AlphaDropout": keras.layers.AlphaDropout(0.5, seed=6),
        "Spatial": shaped((4, 4), keras.layers.SpatialDropout1D(0.5, seed=7)),
        "LSTM": shaped((4, 4), keras.layers.LSTM(4, dropout=0.5, seed=8)),
        "attention": shaped((4, 4), Attention()),
        "nested": nested(9, trainable=True),
        "frozen": nested(10, trainable=False),
        "own": OwnNoise(),
        "global": GlobalNoise(),
        "stateful": StatefulNoise(),
        "flip": image_layer("RandomFlip", seed=11),
        "brightness": image_layer(
            "RandomBrightness", factor=0.5, value_range=(0, 1), seed=12
        ),
        "rotation": image_layer("RandomRotation", factor=0.5, seed=13),
        "translation": image_layer(
            "RandomTranslation", height_factor=0.5, width_factor=0.5, seed=14
        ),
    }


@pytest.mark.slow
def test_layers_of_all_kinds_draw_for_each_client_and_round(
    thread_context: ExecutionContext,
) -> None:
    keras.utils.set_random_seed(0)
    kinds = all_kinds()
    model, places = shows(list(kinds.values()), PIXELS, 2 * ROWS)
    inputs = np.tile(np.linspace(0.2, 1, PIXELS, dtype=np.float32), (ROWS, 1))
    columns = np.eye(2 * ROWS, dtype=np.float32)
    data = [[{"x": inputs, "y": part}] for part in np.split(columns, 2)]
    process = learning.build_fed_avg(model, keras.optimizers.SGD(1.0))
    thread_context.resume_at(0)
    state = process.initialize()

    rounds = [process.next(state, data)[0].weights.trainable for _ in range(2)]

    report = thread_context.last_report
    assert report is not None
    assert (report.no_kernel, report.unkeyed_ops) == ((), ())
    found = {
        f"{name}, {pair}": p_value
        for name, place in zip(kinds, places, strict=True)
        for pair, p_value in correlations([weights[place] for weights in rounds])
    }
    assert min(found.values()) * len(found) > LEAST, found


def correlations(kernels: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yield p-values of what two clients drew, or one in two rounds, by row.

    Args:
        kernels: of each round, a column for each row of a client.
    """
    directions = np.random.default_rng(0).normal(size=len(kernels[0]))
    drawn = {
        (number, client): part
        for number, kernel in enumerate(kernels)
        for client, part in enumerate(np.split(directions @ np.asarray(kernel), 2))
    }
    for one, other in itertools.combinations(drawn, 2):
        p_value: Any = scipy.stats.pearsonr(drawn[one], drawn[other])[1]
        yield f"{one} and {other}", p_value


@pytest.mark.slow
def test_masks_are_those_of_seed_and_call_in_every_way(two_dropouts: Model) -> None:
    process = ALGORITHMS["fed_sgd"][1](two_dropouts)
    ways = [{"kernels": kernels} for kernels in WAYS.values()]
    rounds: list[list[bytes]] = []
    for settings in (*ways, {"workers": 3, "clients_per_leaf": 1}, {"seed": 1}):
        config = ray_fed.Config(backend="local", **settings)
        with ray_fed.create_context(config) as context:
            state = context.invoke(process.initialize)
            after = [context.invoke(process.next, (state, DATA))[0] for _ in range(2)]
            context.resume_at(1)
            after.append(context.invoke(process.next, (state, DATA))[0])
        rounds.append([each.weights.trainable[0].tobytes() for each in after])
        assert all(
            np.array_equal(each.weights.non_trainable, state.weights.non_trainable)
            for each in after
        )

    *same, other = rounds
    assert all(found == same[0] for found in same)
    assert same[0][0] == same[0][2]
    assert len({*same[0], *other}) == 4


def test_layers_of_one_seed_draw_the_same_as_in_keras(
    thread_context: ExecutionContext,
) -> None:
    layers = [keras.layers.Dropout(0.5, seed=seed) for seed in (1, 1, 2)]
    model, _ = shows(layers, UNITS, COLUMNS)
    process = learning.build_fed_sgd(model, keras.optimizers.SGD(1.0))
    thread_context.resume_at(0)

    first, second, other = invoke(process, process.initialize()).weights.trainable

    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def count_kept(model: Model, tuning: int) -> Any:
    """Return by client the inputs that its only step kept, and what the model says."""
    process = learning.build_client_eval(model, fine_tuning=keras.optimizers.SGD(0.5))
    ones = np.ones((1, UNITS), np.float32)
    client = [{"x": ones, "y": np.ones((1, 1), np.float32)}]
    clients = [client] * tuning
    found = process.next(model.initial_weights(), clients, clients)
    return np.array([-each["loss"] for each in found])


def test_fine_tuning_drops_other_units_at_each_client(
    thread_context: ExecutionContext,
) -> None:
    model, _ = shows([keras.layers.Dropout(0.5, seed=1)], UNITS, 1)
    thread_context.resume_at(0)

    kept = np.concatenate([count_kept(model, 100) for _ in range(2)])

    squares = (kept - UNITS / 2) ** 2 / (UNITS / 4)
    chances = scipy.stats.chi2(len(kept))
    assert LEAST < chances.cdf(squares.sum()) < 1 - LEAST
    correlation: Any = scipy.stats.pearsonr(kept[:100], kept[100:])
    assert correlation[1] > LEAST


@pytest.mark.slow
def test_evaluation_draws_for_each_client_where_layers_draw_in_it(
    thread_context: ExecutionContext,
) -> None:
    inputs = keras.Input((UNITS,))
    drawn = {
        "none": keras.layers.Dropout(0.5, seed=1)(inputs),
        "global": GlobalNoise()(inputs),
        "own": OwnNoise()(inputs),
    }
    batch = {"x": np.ones((2, UNITS), np.float32), "y": np.ones(2, np.float32)}
    distinct: dict[str, list[int]] = {}
    for name, output in drawn.items():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = Model.from_keras(keras.Model(inputs, dense(output)), loss="mse")
        own = learning.build_client_eval(model)
        all_together = learning.build_fed_eval({"a": model, "b": model})
        weights = model.initial_weights()
        both = {"a": weights, "b": weights}
        by_client = own.next(weights, [[batch], [batch], [batch, batch]])
        by_call = [all_together.next(both, [[batch]])["a"] for _ in range(2)]
        distinct[name] = [
            len({float(each["loss"]) for each in found})
            for found in (by_client, by_call)
        ]

    assert distinct == {"none": [1, 1], "global": [3, 2], "own": [3, 2]}
    assert len(set(np.asarray(keras.random.normal((3,))))) == 3  # Keras' own, as ever


def test_a_loop_by_hand_draws_for_each_client_round_and_batch(
    thread_context: ExecutionContext,
) -> None:
    model, _ = shows([keras.layers.Dropout(0.5, seed=1)], UNITS, COLUMNS)

    def client(server: Any, batches: Any) -> Any:
        def step(carried: Any, batch: Any) -> Any:
            # The seeds of `passed.weights` are left behind.
            gradients, passed = model.differentiate(server.weights, batch, carried[1])
            return carried[0] - gradients[0], passed.totals

        kernel = server.weights.trainable[0]
        kernel, totals = batches.reduce((kernel, model.totals.zero()), step)
        moved = server.weights._replace(trainable=(kernel,))
        return model.delta(server.weights, moved), 1.0, totals

    process = learning.build_process(
        model, client=client, server=keras.optimizers.SGD(1.0)
    )
    thread_context.resume_at(0)
    state = process.initialize()

    kernels = [invoke(process, state).weights.trainable[0] for _ in range(2)]

    masks = {
        mask.tobytes() for kernel in kernels for mask in bits_of(kernel, 1).values()
    }
    assert len(masks) == 2 * COLUMNS
    report = thread_context.last_report
    assert report is not None
    assert (report.no_kernel, report.unkeyed_ops) == ((), ())
