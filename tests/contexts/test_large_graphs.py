"""Graphs with large constants on a real Ray: they travel once, not with each call."""

import gc
import os
import signal
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.cluster.object_store import LARGE_PLAN_BYTES, StoredKernel
from ray_fed.cluster.subround import Work
from tests.fixtures import ContextFactory, report_of

pytestmark = pytest.mark.ray

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
SETTINGS = {"workers": 2, "seed": 3}
BASE = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
VALUES = [np.float32(0.1 * index) for index in range(8)]


@rtf.computation(np.float32)
def project(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_less(x, 100.0)]):
        drawn = tf.random.normal([1, 256]) * x
    return tf.matmul(drawn, tf.constant(BASE))


@fl.federated_computation(AT_CLIENTS)
def mean_of_projections(values: Any) -> Any:
    return fl.federated_mean(fl.federated_map(project, values))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What was given to tasks."""
    found: list[list[Any]] = []
    as_arguments = Work.as_arguments

    def note(work: Work) -> list[Any]:
        found.append(as_arguments(work))
        return found[-1]

    monkeypatch.setattr(Work, "as_arguments", note)
    return found


def kernel_of(arguments: list[Any]) -> Any:
    plan, _ = Work.from_arguments(*arguments).unpack()
    return plan.kernel


def test_large_constants_travel_once(
    ray_contexts: ContextFactory, sent: list[list[Any]]
) -> None:
    context = ray_contexts(**SETTINGS, subrounds=2)

    for _ in range(3):
        context.invoke(mean_of_projections, VALUES)

    assert len(sent) == 3 * 2  # rounds, workers
    for head, work, functions, *_ in sent:
        assert len(head) + len(work) < LARGE_PLAN_BYTES
        assert len(functions) == 3  # references in a list
    kernels = {kernel_of(arguments) for arguments in sent}
    assert len(kernels) == 1
    assert isinstance(kernels.pop(), StoredKernel)
    assert report_of(context).kernel_leaves == len(VALUES)


@pytest.mark.slow
def test_store_is_empty_once_nobody_has_the_kernel(
    ray_contexts: ContextFactory, ray_memory: Any
) -> None:
    context = ray_contexts(**SETTINGS)
    gc.collect()
    before = ray_memory.rest(ray_memory.stored_bytes)

    context.invoke(mean_of_projections, VALUES)

    assert ray_memory.stored_bytes() > before + BASE.nbytes
    ray_contexts(**SETTINGS)  # closes the other one
    del context
    gc.collect()
    assert ray_memory.settle(ray_memory.stored_bytes, before) <= before


@pytest.mark.slow
def test_bits_are_those_of_threads_and_of_a_new_worker(
    ray_contexts: ContextFactory, local_contexts: ContextFactory
) -> None:
    threads = local_contexts(**SETTINGS)
    expected = [threads.invoke(mean_of_projections, VALUES) for _ in range(3)]
    context = ray_contexts(**SETTINGS)

    found = [context.invoke(mean_of_projections, VALUES)]
    found.append(context.invoke(mean_of_projections, VALUES))
    report = report_of(context)
    os.kill(report.subrounds[0].worker_pid, signal.SIGKILL)
    found.append(context.invoke(mean_of_projections, VALUES))

    for before, after in zip(expected, found, strict=True):
        np.testing.assert_array_equal(before, after)


def test_client_that_fails_is_named_by_the_interpreter(
    ray_contexts: ContextFactory,
) -> None:
    context = ray_contexts(**SETTINGS)
    values = [*VALUES[:5], np.float32(100.0), *VALUES[6:]]

    with pytest.raises(errors.ComputationError) as raised:
        context.invoke(mean_of_projections, values)

    assert raised.value.location.client_index == 5
    assert context.invoke(mean_of_projections, VALUES).shape == (1, 1024)
