"""Algorithms of each kind have the same bits in a resumed run, and on Ray.

Those of all on threads are stored: see `contexts/test_stored_results`.
"""

import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ray_fed import learning
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


def test_resumed_run_has_the_bits_of_one_in_one_go(
    process: LearningProcess,
    clients: list[Any],
    tmp_path: pathlib.Path,
    thread_context: ExecutionContext,
) -> None:
    many = [clients[index % NUM_CLIENTS] for index in range(100)]
    data, size = (many, None) if process.privacy else (clients, 4)
    arguments: dict[str, Any] = {"cohort_size": size, "seed": 3}

    thread_context.resume_at(0)  # as a new program
    whole = learning.run(process, data, num_rounds=5, **arguments)
    for num_rounds in (2, 5):
        thread_context.resume_at(0)
        parts = learning.run(
            process, data, num_rounds=num_rounds, storage_path=tmp_path, **arguments
        )

    assert bits_of(parts) == bits_of(whole)


def bits_of(result: learning.TrainingResult) -> list[bytes]:
    """Return the bits of a run's state, of what its clients keep, and its metrics."""
    kept = result.client_states
    parts = (
        result.state,
        kept and kept.take(range(NUM_CLIENTS)),
        [dict(record.training) for record in result.history],
    )
    return [np.asarray(leaf).tobytes() for leaf in tf.nest.flatten(parts)]


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
