"""Keras draws inside computations: keyed by seed, call, client, op and evaluation."""

from collections.abc import Callable, Mapping
from typing import Any

import federated_language as fl
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from keras import layers

import ray_fed
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.tensorflow import keras_seeds
from tests.contexts.draw_statistics import WAYS
from tests.fixtures import EACH_BACKEND, ContextFactory, report_of

PIXELS = np.arange(64, dtype=np.float32).reshape(1, 8, 8, 1) ** 1.5
SETTINGS = {"workers": 2, "subrounds": 3}
"""Of what `build` builds."""

Draw = Callable[[], Any]
initializers: Any = keras.initializers
RANGE: Any = (1.0, 1.0)
KERAS_OF_TENSORFLOW: Any = tf.keras


def trained(layer: Any, inputs: Any = None) -> Any:
    return layer(tf.ones([256]) if inputs is None else inputs, training=True)


def image(layer: Any) -> Any:
    return trained(layer, tf.constant(PIXELS))


def in_a_loop(seed: Any) -> Any:
    total = tf.zeros([4])
    for _ in tf.range(3):
        total = 10 * total + keras.random.uniform([4], seed=seed)
    return total


def in_a_dataset(layer: Any) -> Any:
    def draw(_: Any) -> Any:
        return trained(layer)

    rows = tf.data.Dataset.range(3).map(draw)
    return rows.reduce(tf.zeros([256]), lambda total, row: 3 * total + row)


def in_a_tf_function(layer: Any) -> Any:
    call = tf.function(lambda: trained(layer))
    return [call(), call()]


def in_a_row(layer: Any) -> Any:
    return [image(layer) for _ in range(4)]


def stateless(layer: Any, seeds: Any) -> Any:
    return layer.stateless_call([], seeds, tf.ones([256]), training=True)[0]


def stateless_twice(layer: Any) -> Any:
    layer.build([256])
    ones = tf.ones([256])
    first, seeds = layer.stateless_call([], layer.variables, ones, training=True)
    return first - stateless(layer, seeds)


def of_a_model() -> Any:
    stack = [keras.Input((4,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(4)]
    return trained(keras.Sequential(stack), tf.ones([2, 4]))


random = keras.random
outside = random.SeedGenerator(5)
unseeded = random.SeedGenerator()
dropout = layers.Dropout(0.5)
rotation = layers.RandomRotation(0.3)
pure = layers.Dropout(0.5)
pure.build([256])
SEEDS = [variable.numpy() for variable in pure.variables]

DRAWS: Mapping[str, Draw] = {
    "normal": lambda: random.normal([4]),
    "uniform": lambda: random.uniform([4]),
    "truncated": lambda: random.truncated_normal([4]),
    "randint": lambda: random.randint([4], 0, 1_000_000),
    "gamma": lambda: random.gamma([4], 2.0),
    "beta": lambda: random.beta([4], 2.0, 3.0),
    "binomial": lambda: random.binomial([16], 1000.0, 0.5),
    "categorical": lambda: random.categorical(tf.zeros([1, 1000]), 8),
    "shuffle": lambda: random.shuffle(tf.range(20)),
    "dropout": lambda: random.dropout(tf.ones([256]), 0.5),
    "generator": lambda: random.normal([4], seed=random.SeedGenerator(3)),
    "from outside": lambda: random.normal([4], seed=outside),
    "from outside, no seed": lambda: random.normal([4], seed=unseeded),
    "Dropout": lambda: trained(layers.Dropout(0.5)),
    "Dropout of a seed": lambda: trained(layers.Dropout(0.5, seed=7)),
    "Dropout from outside": lambda: trained(dropout),
    "tf.keras": lambda: trained(KERAS_OF_TENSORFLOW.layers.Dropout(0.5)),
    "GaussianNoise": lambda: trained(layers.GaussianNoise(1.0)),
    "LSTM": lambda: trained(layers.LSTM(4, dropout=0.5), tf.ones([2, 4, 4])),
    "model": of_a_model,
    "initializer": lambda: initializers.RandomNormal()([4]),
    "Orthogonal": lambda: initializers.Orthogonal()([4, 4]),
    "rotation": lambda: image(layers.RandomRotation(0.3)),
    "rotation from outside": lambda: image(rotation),
    "crop": lambda: in_a_row(layers.RandomCrop(2, 2)),
    "elastic": lambda: image(layers.RandomElasticTransform(RANGE)),
    "loop": lambda: in_a_loop(outside),
    "loop, global": lambda: in_a_loop(None),
    "dataset": lambda: in_a_dataset(layers.Dropout(0.5)),
    "dataset, outside": lambda: in_a_dataset(dropout),
    "tf.function": lambda: in_a_tf_function(layers.Dropout(0.5)),
    "stateless": lambda: stateless_twice(layers.Dropout(0.5)),
    "stateless, arrays": lambda: stateless(pure, SEEDS),
}


def flat(tensors: Any) -> Any:
    parts = [tf.cast(t, tf.float32) for t in tf.nest.flatten(tensors)]
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)


def at_clients(draws: Mapping[str, Draw]) -> Any:
    """Return a computation of what each client draws, by name."""

    @rtf.computation(np.int32)
    def work(client: Any) -> Any:
        del client
        return {name: flat(draw()) for name, draw in draws.items()}

    @fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
    def drawn(clients: Any) -> Any:
        return fl.federated_map(work, clients)

    return drawn


def invoke(context: ExecutionContext, comp: Any, clients: int = 3) -> dict[str, Any]:
    """Return what clients draw, an array of clients in each call, by name."""
    results = context.invoke(comp, list(range(clients)))
    return {name: np.stack([each[name] for each in results]) for name in results[0]}


def bytes_of(calls: list[dict[str, Any]]) -> dict[str, list[bytes]]:
    """Return what each client drew in each call, by name."""
    return {name: [row.tobytes() for c in calls for row in c[name]] for name in DRAWS}


def test_keras_draws_anew_for_each_client_and_call(
    local_contexts: ContextFactory,
) -> None:
    context = local_contexts(workers=1)
    comp = at_clients(DRAWS)

    found = bytes_of([invoke(context, comp) for _ in range(2)])

    report = report_of(context)
    assert (report.no_kernel, report.unkeyed_ops) == ((), ())
    assert [name for name, rows in found.items() if len(set(rows)) < 6] == []
    interpreted, other_seed = (
        bytes_of([invoke(local_contexts(workers=2, subrounds=3, **settings), comp)])
        for settings in ({"kernels": {"enabled": False}}, {"seed": 1})
    )
    assert interpreted == {name: rows[:3] for name, rows in found.items()}
    assert not [name for name in DRAWS if set(other_seed[name]) & set(found[name])]


@pytest.mark.parametrize("name", ["initializer", "from outside, no seed", "crop"])
def test_draws_without_a_seed_are_those_of_the_code(
    local_contexts: ContextFactory, name: str
) -> None:
    traced = [at_clients({name: DRAWS[name]}) for _ in range(2)]

    one, other = (invoke(local_contexts(workers=1), comp) for comp in traced)

    assert np.array_equal(one[name], other[name])


@EACH_BACKEND
def test_backends_draw_the_same(build: ContextFactory) -> None:
    names = ("Dropout", "normal", "dataset, outside")
    comp = at_clients({name: DRAWS[name] for name in names})
    context = build()
    context.resume_at(0)
    config = ray_fed.Config(backend="local", workers=1)
    with ray_fed.create_context(config) as local:
        expected = invoke(local, comp)

    found = invoke(context, comp)

    assert all(np.array_equal(found[name], expected[name]) for name in names)


def test_seeds_mean_what_keras_says(local_contexts: ContextFactory) -> None:
    comp = at_clients(
        {
            "number": lambda: random.normal([4], seed=3),
            "initializer": lambda: initializers.GlorotUniform(seed=1)([2, 2]),
            "one": lambda: trained(layers.Dropout(0.5, seed=1)),
            "same": lambda: trained(layers.Dropout(0.5, seed=1)),
            "other": lambda: trained(layers.Dropout(0.5, seed=2)),
        }
    )

    found = invoke(local_contexts(workers=1), comp)

    numbers = np.asarray(random.normal([4], seed=3))
    assert np.array_equal(found["number"], np.tile(numbers, (3, 1)))
    weights = np.asarray(keras.initializers.GlorotUniform(seed=1)([2, 2])).ravel()
    assert np.array_equal(found["initializer"], np.tile(weights, (3, 1)))
    assert np.array_equal(found["one"], found["same"])
    assert not np.array_equal(found["one"], found["other"])


def test_tracing_leaves_keras_own_generators_alone() -> None:
    before = np.asarray(outside.state)

    at_clients(DRAWS)

    assert np.array_equal(outside.state, before)
    assert len(set(np.asarray(random.normal((3,))))) == 3
    assert np.asarray(trained(layers.Dropout(0.5))).any()


def test_keras_that_is_imported_by_the_function_has_keys(
    local_contexts: ContextFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras_seeds.forget_global_draws()
    loaded = iter([False, False])
    monkeypatch.setattr(keras_seeds, "is_loaded", lambda: next(loaded, True))
    comp = at_clients({"normal": DRAWS["normal"]})

    found = invoke(local_contexts(workers=1), comp)["normal"]

    assert len({row.tobytes() for row in found}) == 3
    assert len(set(np.asarray(random.normal((3,))))) == 3


@pytest.mark.parametrize("way", WAYS)
def test_draws_are_distributed_and_independent(way: str) -> None:
    clients, least = 2000, 0.001
    comp = at_clients(
        {
            "normal": lambda: random.normal([2]),
            "seeded": lambda: random.normal([2], seed=random.SeedGenerator(1)),
            "outside": lambda: random.normal([2], seed=outside),
            "initializer": lambda: initializers.RandomNormal(stddev=1.0)([2]),
        }
    )
    config = ray_fed.Config(backend="local", workers=1, kernels=dict(WAYS[way]))
    with ray_fed.create_context(config) as context:
        calls = [invoke(context, comp, clients) for _ in range(2)]

    drawn = np.hstack([rows for call in calls for rows in call.values()])
    fits: list[float] = [scipy.stats.kstest(c, "norm").pvalue for c in drawn.T]
    between_draws = np.corrcoef(drawn.T)[np.triu_indices(16, 1)]
    neighbors = [scipy.stats.pearsonr(c[1:], c[:-1])[0] for c in drawn.T]
    scores = np.abs(np.hstack([between_draws, neighbors])) * np.sqrt(clients)
    related = 2 * scipy.stats.norm.sf(scores)
    assert min(fits) * len(fits) > least, fits
    assert min(related) * len(related) > least, related
