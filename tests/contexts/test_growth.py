"""Preparing a graph takes as much more work as there is more of the graph."""

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed
from ray_fed import tensorflow as rtf
from tests.fixtures import report_of

VECTOR = fl.TensorType(np.float32, [4])
CLIENTS = [[np.full(4, 0.5, np.float32)] * 2, [np.ones(4, np.float32)] * 3]


def build_round(num_weights: int, ops_a_weight: int) -> Any:
    weights_type = fl.StructType([(None, VECTOR)] * num_weights)
    data_type = fl.SequenceType(VECTOR)

    @rtf.computation(weights_type, data_type)
    @tf.autograph.experimental.do_not_convert
    def train(weights: Any, dataset: Any) -> Any:
        variables = [tf.Variable(weight) for weight in weights]

        def step(count: Any, x: Any) -> Any:
            for variable in variables:
                value = variable.read_value()
                for _ in range(ops_a_weight):
                    x = tf.tanh(x * value)
                variable.assign_sub(x)
            return count + 1

        @tf.function(autograph=False)
        def run() -> Any:
            for variable, weight in zip(variables, weights, strict=True):
                variable.assign(weight)
            count = dataset.reduce(0, step)
            return [variable.read_value() for variable in variables], count

        return run()

    @fl.federated_computation(
        fl.FederatedType(weights_type, fl.SERVER),
        fl.FederatedType(data_type, fl.CLIENTS),
    )
    def round_of(weights: Any, data: Any) -> Any:
        sent = fl.federated_broadcast(weights)
        trained = fl.federated_map(train, (sent, data))
        return fl.federated_mean(trained[0]), fl.federated_sum(trained[1])

    return round_of


def run_round(num_weights: int, ops_a_weight: int = 2) -> None:
    weights = [np.ones(4, np.float32)] * num_weights
    config = ray_fed.Config(backend="local", workers=1)

    with ray_fed.create_context(config) as context:
        comp = build_round(num_weights, ops_a_weight)
        means, count = context.invoke(comp, (weights, CLIENTS))

    assert count == 5
    assert len(means) == num_weights
    assert report_of(context).kernel_leaves


def count_calls(work: Callable[[], None]) -> int:
    """Return how many functions were called, on all threads that the work starts."""
    calls = itertools.count()

    def note(frame: Any, event: str, arg: Any) -> None:
        del frame, arg
        if event in ("call", "c_call"):
            next(calls)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(calls)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_step_of_preparing_a_graph_grows_faster_than_the_graph() -> None:
    run_round(2)  # what is done once

    small, middle, large = (
        count_calls(lambda size=size: run_round(size)) for size in (6, 12, 24)
    )

    assert 1.8 < (large - middle) / (middle - small) < 2.2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_graph_of_ten_thousand_nodes_is_prepared_in_time() -> None:
    run_round(2, 2_500)
