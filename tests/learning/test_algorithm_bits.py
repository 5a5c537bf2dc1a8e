"""Algorithms of each kind have the same bits on Ray, though a worker dies.

Those of all on threads are stored: see `contexts/test_stored_results`. Resumed runs
are in `test_client_state_runs` and `test_private_runs`.
"""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import LearningProcess
from tests.stored_results import process_of

BatchMaker = Callable[..., list[Any]]

ROUNDS = 3
NUM_CLIENTS = 7


pytestmark = pytest.mark.slow


@pytest.fixture(params=["scaffold", "private mean"])
def process(request: pytest.FixtureRequest) -> LearningProcess:
    """With values of clients, and with an aggregator's state and noise: all saved."""
    return process_of(request.param)


@pytest.fixture
def clients(make_batches: BatchMaker) -> list[Any]:
    sizes = [[4, 4, 1], [2], [7, 7, 3], [5], [1, 1], [8], [3, 2]]
    return [make_batches(each, seed) for seed, each in enumerate(sizes)]


def rounds_of(
    process: LearningProcess, clients: list[Any], context: ExecutionContext
) -> Iterator[bytes]:
    """Yield the bits of state, clients' values and metrics after each round."""
    state = context.invoke(process.initialize, None)
    kept = [process.initial_client_state] * len(clients)
    for _ in range(ROUNDS):
        if process.initial_client_state is None:
            state, metrics = context.invoke(process.next, (state, clients))
        else:
            state, kept, metrics = context.invoke(process.next, (state, kept, clients))
        report = context.last_report
        assert report is not None
        assert (report.no_kernel, report.interpreted) == ((), ())
        leaves: list[Any] = tf.nest.flatten((state, kept, metrics))
        yield b"".join(np.asarray(leaf).tobytes() for leaf in leaves)


@pytest.mark.ray
def test_bits_on_ray_are_those_of_threads_though_a_worker_dies(
    process: LearningProcess,
    clients: list[Any],
    local_contexts: Any,
    ray_contexts: Any,
) -> None:
    expected = list(rounds_of(process, clients, local_contexts(workers=2, seed=5)))
    context = ray_contexts(workers=2, seed=5)
    found: list[bytes] = []

    for bits in rounds_of(process, clients, context):
        found.append(bits)
        if len(found) == 1:
            report = context.last_report
            os.kill(report.subrounds[0].worker_pid, signal.SIGKILL)

    assert found == expected
