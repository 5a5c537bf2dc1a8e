"""Rounds leave nothing behind: neither in the object store nor in any process."""

from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext

ContextFactory = Callable[..., ExecutionContext]

MODEL = fl.TensorType(np.float32, [40_000])
DATA = fl.TensorType(np.float32, [7_500])
"""The model is stored once; of a client's two values those of a subround, 60 kB each,
travel in its call, which Ray stores as it holds more than 100 kB."""


@rtf.computation(MODEL, DATA, DATA)
def train(model: Any, x: Any, y: Any) -> Any:
    return tf.math.tanh(model + tf.reduce_mean(x * y))


@fl.federated_computation(
    fl.FederatedType(MODEL, fl.SERVER),
    fl.FederatedType(DATA, fl.CLIENTS),
    fl.FederatedType(DATA, fl.CLIENTS),
)
def one_round(model: Any, x: Any, y: Any) -> Any:
    updates = fl.federated_map(train, (fl.federated_broadcast(model), x, y))
    return fl.federated_mean(updates)


@pytest.mark.ray
def test_rounds_leave_nothing_in_the_object_store(
    ray_contexts: ContextFactory, ray_memory: Any
) -> None:
    context = ray_contexts(workers=2)
    clients = [np.full(7_500, index, np.float32) for index in range(4)]
    model = context.invoke(one_round, (np.zeros(40_000, np.float32), clients, clients))
    del model
    references = ray_memory.settle(ray_memory.num_references, 0)
    stored = ray_memory.settle(ray_memory.stored_bytes, 0)

    model = np.zeros(40_000, np.float32)
    for _ in range(4):
        model = context.invoke(one_round, (model, clients, clients))
    del model

    assert ray_memory.settle(ray_memory.num_references, references) <= references
    assert ray_memory.settle(ray_memory.stored_bytes, stored) <= stored
