"""A node is taken away without notice; its worker finds no other place."""

import asyncio
import time
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed
import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.framework import RayExecutorFactory
from ray_fed.program import RayFederatedContext

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _two_nodes(cluster: Any) -> None:
    """Give the cluster what a test before took away."""
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(num_cpus=1)


def test_node_that_is_removed_costs_its_subround_only(
    cluster: Any, contexts: Any, client_work: Any, meanwhile: Any, runs: Any
) -> None:
    work = client_work(waiting=(3, 11))
    expected = work.expected(3)
    context = contexts(workers=2, subrounds=2, stragglers={"enabled": False})

    meanwhile(work.let_go_once_all_run)
    bits = [work.run(context)]
    work.reset()

    pids = {s.worker_pid for s in context.last_report.subrounds}

    def remove_a_node() -> None:
        work.wait_for(3, 11)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        work.wait_until(lambda: not all(runs(pid) for pid in pids))
        work.let_go()

    meanwhile(remove_a_node)
    bits.append(work.run(context))

    assert bits == expected[:2]
    report = context.last_report
    ((index, (attempt,)),) = [
        (s.subround_index, s.lost) for s in report.subrounds if s.lost
    ]
    assert attempt.ended in {"crash", "preemption"}
    once, twice = [1] * 8, [2] * 4 + [1] * 4
    assert work.runs() == (twice + once if index == 0 else once + twice)

    # The lost worker has no place any more; the other one carries on alone.
    bits.append(work.run(context))

    assert bits == expected
    assert len({s.worker_pid for s in context.last_report.subrounds}) == 1
    assert context.last_report.retries == {}


STATE = fl.TensorType(np.float32, [100_000])
AT_SERVER = fl.FederatedType(STATE, fl.SERVER)


@rtf.computation(STATE, np.float32)
def add(state: Any, x: Any) -> Any:
    return state + x


@fl.federated_computation(AT_SERVER, fl.FederatedType(np.float32, fl.CLIENTS))
def step(state: Any, clients: Any) -> Any:
    mean = fl.federated_mean(clients)
    return fl.federated_map(add, (state, mean)), mean


def test_state_outlives_the_nodes_that_made_it(cluster: Any, contexts: Any) -> None:
    clients = [np.float32(x) for x in range(4)]
    with RayFederatedContext(contexts(workers=2, subrounds=2)) as program:
        state, mean = program.invoke(step, (np.zeros(100_000, np.float32), clients))
        first = asyncio.run(fl.program.materialize_value(mean))
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node, allow_graceful=False)
            cluster.add_node(num_cpus=1)
        state, _ = program.invoke(step, (state, clients))
        found = asyncio.run(fl.program.materialize_value(state))

    assert first == 1.5
    np.testing.assert_array_equal(found, np.full(100_000, 3.0, np.float32))


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


def test_worker_of_a_factory_without_a_place_is_an_error_in_time(cluster: Any) -> None:
    workers = ray_fed.Workers(count=2, wait_timeout_s=WAIT_TIMEOUT_S)
    with RayExecutorFactory(ray_fed.Config(workers=workers), "auto") as factory:
        context = fl.framework.SyncExecutionContext(factory)
        before = context.invoke(halves, CLIENTS)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        with pytest.raises(errors.ResourceError, match="at least 2 workers") as raised:
            call_for_seconds(context)

    assert before == [client // 2 for client in CLIENTS]
    assert "`workers.wait_timeout_s`" in str(raised.value)
