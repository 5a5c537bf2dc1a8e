"""A reservoir sample of clients is a sample: each of them, and each subset, as likely.

Jeffrey S. Vitter, "Random Sampling with a Reservoir", ACM Transactions on Mathematical
Software 11 (1985), https://doi.org/10.1145/3147.3165, algorithm R. Reservoirs are
merged by the hypergeometric distribution of how many elements come from either. A call
draws many samples at once, each by numbers of its own.
"""

import importlib
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from tests.fixtures import ContextFactory

stats: Any = importlib.import_module("scipy.stats")

NUM_CLIENTS = 200
SIZE = 10
"""Of a sample; each of the cohort's sixteen leaves has more clients."""
NUM_SAMPLES = 50
"""Of one call."""
NUM_CALLS = 3
LEAST = 1e-3
"""Below what p-value a sample is none; the seed is fixed."""

SAMPLES = fl.TensorType(np.int32, [NUM_SAMPLES, SIZE])
RESERVOIR = fl.StructType([("clients", SAMPLES), ("seen", np.int32)])


@rtf.computation
def empty() -> Any:
    return {"clients": tf.fill([NUM_SAMPLES, SIZE], -1), "seen": 0}


@rtf.computation(RESERVOIR, np.int32)
def add(reservoir: Any, client: Any) -> Any:
    seen = reservoir["seen"]
    drawn = tf.random.uniform([NUM_SAMPLES, 1], maxval=seen + 1, dtype=tf.int32)
    is_replaced = tf.range(SIZE) == tf.where(seen < SIZE, seen, drawn)
    clients = tf.where(is_replaced, client, reservoir["clients"])
    return {"clients": clients, "seen": seen + 1}


def in_any_order(number: Any) -> Any:
    """Return for each sample so many indices, shuffled."""
    return tf.argsort(tf.random.uniform([NUM_SAMPLES, number], dtype=tf.float64))


@rtf.computation(RESERVOIR, RESERVOIR)
def join(left: Any, right: Any) -> Any:
    seen = left["seen"] + right["seen"]
    taken = in_any_order(seen)[:, :SIZE]
    num_left = tf.reduce_sum(tf.cast(taken < left["seen"], tf.int32), 1, keepdims=True)
    shuffled = [
        tf.gather(side["clients"], in_any_order(SIZE), batch_dims=1)
        for side in (left, right)
    ]
    clients = tf.where(tf.range(SIZE) < num_left, *shuffled)
    return {"clients": clients, "seen": seen}


@rtf.computation(RESERVOIR)
def clients_of(reservoir: Any) -> Any:
    return reservoir["clients"]


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def sampled(clients: Any) -> Any:
    return fl.federated_aggregate(clients, empty(), add, join, clients_of)


@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "interpreter"])
def test_reservoir_sample_of_clients_is_a_simple_random_sample(
    local_contexts: ContextFactory, enabled: bool
) -> None:
    context = local_contexts(workers=1, kernels={"enabled": enabled})
    clients = list(range(NUM_CLIENTS))

    calls = [context.invoke(sampled, clients) for _ in range(NUM_CALLS)]

    samples = np.concatenate(calls)
    assert all(len(set(sample)) == SIZE for sample in samples)
    assert samples.min() >= 0
    assert each_client_as_often(samples) > LEAST
    assert each_number_of_the_first_half_as_likely(samples) > LEAST


def each_client_as_often(samples: Any) -> float:
    """Return the p-value of the chi-squared test of how often each client was taken."""
    counts = np.bincount(samples.ravel(), minlength=NUM_CLIENTS)
    share = SIZE / NUM_CLIENTS
    # Of a sample without replacement the counts vary less than those of one with.
    variance = len(samples) * share * (1 - share) * NUM_CLIENTS / (NUM_CLIENTS - 1)
    statistic = ((counts - len(samples) * share) ** 2).sum() / variance
    return float(stats.chi2.sf(statistic, NUM_CLIENTS - 1))


def each_number_of_the_first_half_as_likely(samples: Any) -> float:
    """Return the p-value of how many of each sample are of the first hundred."""
    numbers = (samples < NUM_CLIENTS // 2).sum(1)
    law = stats.hypergeom(NUM_CLIENTS, NUM_CLIENTS // 2, SIZE)
    edges = [2, 3, 4, 5, 6, 7]  # fewer and more are rare: they count with these
    found = [np.sum(np.clip(numbers, 2, 7) == number) for number in edges]
    shares = [law.cdf(2), *law.pmf(edges[1:-1]), law.sf(6)]
    return float(stats.chisquare(found, np.multiply(shares, len(samples)))[1])
