from typing import Any

import keras
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed.learning import Model, aggregators, build_fed_avg, build_process
from ray_fed.learning.local_training import LocalTraining, build_training, send_weights
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.server_update import build_server_update


def test_parts_whose_types_do_not_go_together_are_refused(linear_model: Model) -> None:
    spec = OptimizerSpec(keras.optimizers.SGD(0.05))
    finalize = build_server_update(linear_model, spec)
    sending = send_weights(linear_model, finalize)
    work = build_training(linear_model, LocalTraining(spec))
    parts: dict[str, Any] = {
        "distribute": sending,
        "client_work": work,
        "aggregate": aggregators.mean(),
        "finalize": finalize,
    }

    build: Any = build_process

    for name, wrong in {
        "distribute.next": {"distribute": work},
        "client_work.next": {"client_work": sending},
        "aggregate.next": {"aggregate": finalize},
    }.items():
        with pytest.raises(errors.ValueMismatchError, match=f"Expected `{name}` to"):
            build(linear_model, **{**parts, **wrong})


def test_learning_rate_of_clients_follows_the_round(
    linear_model: Model, make_batches: Any
) -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.0])
    process = build_fed_avg(
        linear_model, keras.optimizers.SGD(0.5), client_learning_rate=schedule
    )
    clients = [make_batches([4], 0)]
    start = process.initialize()

    first, _ = process.next(start, clients)
    second, _ = process.next(first, clients)

    assert not np.array_equal(first.weights.trainable[0], start.weights.trainable[0])
    np.testing.assert_array_equal(
        second.weights.trainable[0], first.weights.trainable[0]
    )
