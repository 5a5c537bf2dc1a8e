"""A factory's worker is lost with its node, and finds no other place."""

import time
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.framework import RayExecutorFactory

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]

WAIT_TIMEOUT_S = 20.0  # also for the first two processes, on a slow machine
CLIENTS = list(range(64))


@rtf.computation(np.int32)
def half(x: Any) -> Any:
    return x // 2


@fl.federated_computation(fl.FederatedType(np.int32, fl.CLIENTS))
def halves(clients: Any) -> Any:
    return fl.federated_map(half, clients)


def call_for_seconds(context: Any) -> None:
    """Call again and again: a worker's process may outlive its node for seconds."""
    for _ in range(600):
        context.invoke(halves, CLIENTS)
        time.sleep(0.2)


def test_worker_without_a_place_is_an_error_in_time(cluster: Any) -> None:
    workers = ray_fed.Workers(count=2, wait_timeout_s=WAIT_TIMEOUT_S)
    with RayExecutorFactory(ray_fed.Config(workers=workers), "auto") as factory:
        context = fl.framework.SyncExecutionContext(factory)
        before = context.invoke(halves, CLIENTS)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        with pytest.raises(errors.ResourceError, match="at least 2 workers") as raised:
            call_for_seconds(context)

    assert before == [client // 2 for client in CLIENTS]
    assert "`workers.wait_timeout_s`" in str(raised.value)
