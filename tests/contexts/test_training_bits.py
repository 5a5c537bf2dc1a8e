"""The demo's training ends with the same weights, bit for bit, wherever it runs."""

from collections.abc import Callable
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed
from ray_fed import learning
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.learning import digits

ContextFactory = Callable[..., ExecutionContext]
Job = tuple[Any, list[list[Any]]]

NUM_CLIENTS = 8
NUM_ROUNDS = 2


@pytest.fixture(scope="session")
def job() -> Job:
    """The demo's process, and a part of its clients' batches."""
    clients, _ = digits.load_clients(NUM_CLIENTS, seed=0)
    process = digits.build_process(digits.build_model(seed=0))
    return process, [batches[:4] for batches in clients]


def train(context: ExecutionContext, job: Job) -> list[bytes]:
    process, clients = job
    with fl.framework.get_context_stack().install(context):
        result = learning.run(
            process, clients, num_rounds=NUM_ROUNDS, cohort_size=NUM_CLIENTS - 1, seed=0
        )
    weights = result.state.weights
    return [
        np.asarray(tensor).tobytes()
        for tensor in (*weights.trainable, *weights.non_trainable)
    ]


@pytest.fixture(scope="session")
def expected(job: Job) -> list[bytes]:
    config = ray_fed.Config(backend="local", workers=1, subrounds=1)
    with ray_fed.create_context(config) as context:
        return train(context, job)


@pytest.mark.ray
@pytest.mark.parametrize("subrounds", [1, pytest.param(4, marks=pytest.mark.slow), 7])
def test_weights_on_ray_equal_local_ones(
    ray_contexts: ContextFactory,
    job: Job,
    expected: list[bytes],
    num_workers: int,
    subrounds: int,
) -> None:
    context = ray_contexts(workers=num_workers, subrounds=subrounds)

    weights = train(context, job)

    assert weights == expected


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("subrounds", [4, 7])
def test_local_weights_do_not_depend_on_the_cut(
    local_contexts: ContextFactory,
    job: Job,
    expected: list[bytes],
    workers: int,
    subrounds: int,
) -> None:
    context = local_contexts(workers=workers, subrounds=subrounds)

    assert train(context, job) == expected
