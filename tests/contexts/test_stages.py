"""Aggregations of values that depend on earlier aggregations: stage by stage."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from tests.fixtures import ContextFactory, report_of
from tests.result_bits import bits

VECTOR = fl.TensorType(np.float32, [3])
VECTORS = fl.FederatedType(VECTOR, fl.CLIENTS)
SCALARS = fl.FederatedType(np.float32, fl.CLIENTS)


@rtf.computation(VECTOR)
def length(vector: Any) -> Any:
    return tf.norm(vector)


@rtf.computation(VECTOR, np.float32)
def clip(vector: Any, bound: Any) -> Any:
    return tf.clip_by_norm(vector, bound)


@fl.federated_computation(VECTORS)
def clipped_mean(vectors: Any) -> Any:
    """The mean of what is clipped to the mean length."""
    bound = fl.federated_mean(fl.federated_map(length, vectors))
    pairs = (vectors, fl.federated_broadcast(bound))
    return fl.federated_mean(fl.federated_map(clip, pairs)), bound


@rtf.computation(np.float32, np.float32)
def squared_distance(x: Any, mean: Any) -> Any:
    return (x - mean) ** 2


@fl.federated_computation(SCALARS)
def variance(values: Any) -> Any:
    mean = fl.federated_broadcast(fl.federated_mean(values))
    return fl.federated_mean(fl.federated_map(squared_distance, (values, mean)))


@rtf.computation(np.float32, np.float32, np.float32)
def standardise(x: Any, mean: Any, spread: Any) -> Any:
    return (x - mean) / tf.sqrt(spread)


@fl.federated_computation(SCALARS)
def largest_standardised(values: Any) -> Any:
    """Three stages: mean, variance, the largest of standardised values."""
    mean = fl.federated_broadcast(fl.federated_mean(values))
    squares = fl.federated_map(squared_distance, (values, mean))
    spread = fl.federated_broadcast(fl.federated_mean(squares))
    scores = fl.federated_map(standardise, (values, mean, spread))
    return fl.federated_max(scores), scores


@rtf.computation(np.float32)
def with_noise(x: Any) -> Any:
    return x + tf.random.normal([])


@rtf.computation(np.float32, np.float32)
def distance(x: Any, y: Any) -> Any:
    return tf.abs(x - y)


@fl.federated_computation(SCALARS)
def noise_seen_twice(values: Any) -> Any:
    """Zero only where both stages see the same noise: max of |x - max|, min, max."""
    noisy = fl.federated_map(with_noise, values)
    top = fl.federated_max(noisy)
    gaps = fl.federated_map(distance, (noisy, fl.federated_broadcast(top)))
    return fl.federated_min(gaps), top


@fl.federated_computation
def without_argument() -> Any:
    ones = fl.federated_value(np.float32(1), fl.CLIENTS)
    total = fl.federated_broadcast(fl.federated_sum(ones))
    return fl.federated_sum(fl.federated_map(distance, (ones, total)))


VECTOR_ARGS = [np.array([i, 1, 0], np.float32) for i in range(9)]
SCALAR_ARGS = [np.float32(i * i) for i in range(9)]
CASES = [
    pytest.param(clipped_mean, VECTOR_ARGS, id="clipped mean"),
    pytest.param(variance, SCALAR_ARGS, id="variance"),
    pytest.param(largest_standardised, SCALAR_ARGS, id="three stages"),
    pytest.param(noise_seen_twice, SCALAR_ARGS, id="noise"),
    pytest.param(without_argument, None, id="no argument"),
]


@pytest.mark.parametrize(("comp", "arg"), CASES)
def test_bits_do_not_depend_on_the_cut(
    local_contexts: ContextFactory, comp: Any, arg: Any
) -> None:
    contexts = [
        local_contexts(workers=workers, subrounds=subrounds, default_num_clients=9)
        for workers, subrounds in [(1, 1), (2, 3), (3, 7)]
    ]

    results = [bits(context.invoke(comp, arg)) for context in contexts]

    assert all(result == results[0] for result in results)


def test_results_are_those_of_numpy(local_contexts: ContextFactory) -> None:
    context = local_contexts(workers=2, subrounds=3, default_num_clients=9)
    vectors, scalars = np.array(VECTOR_ARGS), np.array(SCALAR_ARGS)
    lengths = np.linalg.norm(vectors, axis=1)
    clipped = vectors * np.minimum(1, lengths.mean() / lengths)[:, np.newaxis]

    mean, bound = context.invoke(clipped_mean, VECTOR_ARGS)

    np.testing.assert_allclose(bound, lengths.mean(), rtol=1e-6)
    np.testing.assert_allclose(mean, clipped.mean(0), rtol=1e-6)
    np.testing.assert_allclose(
        context.invoke(variance, SCALAR_ARGS), scalars.var(), rtol=1e-6
    )
    assert context.invoke(without_argument) == 9 * (9 - 1)


def test_both_stages_see_the_same_random_numbers(
    local_contexts: ContextFactory,
) -> None:
    smallest_gap, _ = local_contexts(workers=2, subrounds=2).invoke(
        noise_seen_twice, SCALAR_ARGS
    )

    assert smallest_gap == 0.0


def test_results_at_clients_are_in_client_order(local_contexts: ContextFactory) -> None:
    top, scores = local_contexts(workers=2, subrounds=4).invoke(
        largest_standardised, SCALAR_ARGS
    )

    values = np.array(SCALAR_ARGS)
    np.testing.assert_allclose(
        scores, (values - values.mean()) / values.std(), rtol=1e-5
    )
    assert top == max(scores)


def test_each_stage_is_cut_into_subrounds(local_contexts: ContextFactory) -> None:
    context = local_contexts(workers=2, subrounds=3)

    context.invoke(variance, SCALAR_ARGS)

    report = report_of(context)
    counts = [subround.num_clients for subround in report.subrounds]
    assert counts == [3, 3, 3, 0, 3, 3, 3, 0]
