"""Subrounds that have several workers, on a real Ray: who runs what, and the bits."""

import os
import pathlib
import signal
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.program import ClientData
from tests.fixtures import ContextFactory, report_of
from tests.result_bits import bits

pytestmark = pytest.mark.ray


NUM_CLIENTS = 12
AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
PIDS = fl.FederatedType(np.int64, fl.CLIENTS)
VALUES = [np.float32(0.1 * index) for index in range(NUM_CLIENTS)]


@rtf.computation(np.float32)
def perturb(x: Any) -> Any:
    return x + tf.random.normal([])


@rtf.computation(np.float32, np.float32)
def scale(x: Any, y: Any) -> Any:
    return x / y


@fl.federated_computation(AT_CLIENTS)
def two_stages(values: Any) -> Any:
    """Average draws, then average what clients make of that and of their own draw."""
    drawn = fl.federated_map(perturb, values)
    mean = fl.federated_broadcast(fl.federated_mean(drawn))
    return fl.federated_mean(fl.federated_map(scale, (drawn, mean)))


@fl.federated_computation(AT_CLIENTS)
def at_clients(values: Any) -> Any:
    drawn = fl.federated_map(perturb, values)
    return drawn, fl.federated_mean(drawn)


@rtf.computation(np.int64, np.int64)
def put(index: Any, pid: Any) -> Any:
    return tf.one_hot(index, NUM_CLIENTS, dtype=tf.int64) * pid


@fl.federated_computation(PIDS, PIDS)
def pid_of_each(indices: Any, pids: Any) -> Any:
    return fl.federated_sum(fl.federated_map(put, (indices, pids)))


@rtf.computation(np.int64)
def same(pid: Any) -> Any:
    return pid


@fl.federated_computation(PIDS)
def pids_at_clients(pids: Any) -> Any:
    """Return which process each client is in."""
    return fl.federated_map(same, pids)


@rtf.computation(np.int64, np.int64)
def add(x: Any, y: Any) -> Any:
    return x + y


@fl.federated_computation(np.int64, PIDS)
def without_form(least: Any, pids: Any) -> Any:
    """Merge by what the argument says, so that no mergeable form has the merge."""

    @fl.federated_computation(np.int64, np.int64)
    def merge(x: Any, y: Any) -> Any:
        return add(add(x, y), least)

    total = fl.federated_aggregate(pids, np.int64(0), add, merge, same)
    return total, fl.federated_map(same, pids)


def own_pid(_: str) -> Any:
    return np.int64(os.getpid())


def ids_of(folder: pathlib.Path | None = None) -> list[str]:
    prefix = "" if folder is None else f"{folder}/"
    return [f"{prefix}{index}" for index in range(NUM_CLIENTS)]


def pid_data() -> ClientData:
    """Return clients each of which has the number of the process that reads it."""
    return ClientData.from_function(ids_of(), own_pid, fl.TensorType(np.int64))


NUM_WORKERS = 2
INDICES = [np.int64(index) for index in range(NUM_CLIENTS)]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "interpreter"])
def test_all_workers_run_clients_of_one_subround(
    ray_contexts: ContextFactory,
    kernels: bool,
) -> None:
    context = ray_contexts(
        workers=NUM_WORKERS, subrounds=1, kernels={"enabled": kernels}
    )
    _await_all(context)

    pids = context.invoke(pid_of_each, (INDICES, pid_data()))

    assert len(set(pids)) == NUM_WORKERS
    assert list(pids) == [
        pid for pid in dict.fromkeys(pids) for _ in range(NUM_CLIENTS // NUM_WORKERS)
    ]
    report = report_of(context)
    assert [s.num_workers for s in report.subrounds] == [NUM_WORKERS, 1]
    assert report.kernel_leaves == (NUM_CLIENTS if kernels else 0)


def test_all_workers_run_clients_of_what_is_not_cut(
    ray_contexts: ContextFactory,
) -> None:
    context = ray_contexts(workers=NUM_WORKERS, subrounds=1)
    _await_all(context)

    total, pids = context.invoke(without_form, (np.int64(5), pid_data()))

    assert len(set(pids)) == NUM_WORKERS
    assert total == sum(pids) + 5 * (NUM_CLIENTS - 1)
    report = report_of(context)
    assert [s.num_workers for s in report.subrounds] == [NUM_WORKERS]


def test_bits_are_those_of_threads(
    ray_contexts: ContextFactory, local_contexts: ContextFactory
) -> None:
    context = ray_contexts(workers=NUM_WORKERS, subrounds=1, seed=7)
    _await_all(context)
    calls = [two_stages, at_clients, two_stages]

    found = [context.invoke(comp, VALUES) for comp in calls]

    local = local_contexts(workers=1, seed=7)
    context.resume_at(context.num_calls)
    local.resume_at(context.num_calls - len(calls))
    expected = [local.invoke(comp, VALUES) for comp in calls]
    assert bits(found) == bits(expected)


def die_once(name: str) -> Any:
    """Return a client's number; the first process that reads the last one dies."""
    path = pathlib.Path(name)
    marker = path.parent / "died"
    if path.name == str(NUM_CLIENTS - 1) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float32(int(path.name))


@pytest.mark.slow
def test_lost_worker_costs_its_subround_once(
    ray_contexts: ContextFactory, tmp_path: pathlib.Path
) -> None:
    context = ray_contexts(workers=NUM_WORKERS, subrounds=1, seed=3)
    _await_all(context)
    data = ClientData.from_function(
        ids_of(tmp_path), die_once, fl.TensorType(np.float32)
    )

    found = context.invoke(two_stages, data)

    report = report_of(context)
    assert report.retries == {"crash": 1}
    assert report.num_retries == 1
    context.resume_at(context.num_calls - 1)
    assert bits(context.invoke(two_stages, data)) == bits(found)


def _await_all(context: ExecutionContext) -> None:
    """Return once all workers are ready and idle."""
    for _ in range(100):
        context.invoke(pids_at_clients, pid_data())
        report = report_of(context)
        if max(s.num_workers for s in report.subrounds) == NUM_WORKERS:
            return
    raise AssertionError("some workers never got ready")
