"""The finish of a round is given what it reads, and no more."""

from collections.abc import Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed
import ray_fed.plan.plans as plans
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.contexts.backend import Backend
from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.contexts.runners import LocalRunner
from ray_fed.plan import outcomes
from ray_fed.tensorflow.tensors import devices
from ray_fed.values.stored import StoredClients

AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)


@rtf.computation(np.float32, np.float32)
def add(x: Any, y: Any) -> Any:
    return x + y


@fl.federated_computation(AT_CLIENTS)
def total(values: Any) -> Any:
    return fl.federated_sum(values)


@fl.federated_computation(AT_SERVER, AT_CLIENTS)
def add_total(start: Any, values: Any) -> Any:
    return fl.federated_map(add, (start, fl.federated_sum(values)))


@fl.federated_computation(AT_CLIENTS)
def square_of_total(values: Any) -> Any:
    first = fl.federated_broadcast(fl.federated_sum(values))
    return fl.federated_sum(fl.federated_map(add, (values, first)))


@fl.federated_computation(AT_CLIENTS, AT_SERVER)
def merged_alone(values: Any, merged: Any) -> Any:
    fl.federated_map(add, (values, fl.federated_broadcast(merged)))
    return merged


class RecordingRunner(LocalRunner):
    """Keeps what finishes were given beside partials."""

    def __init__(self) -> None:
        fingerprint = devices.read_fingerprint(devices.cpu())
        super().__init__(stacks.device_stack(), "recording", fingerprint)
        self.before: list[Any] = []

    @override
    async def invoke(self, comp: Any, arg: Any) -> outcomes.Outcome:
        if isinstance(comp, plans.Finish):
            self.before.append(arg[1])
        return await super().invoke(comp, arg)


@pytest.fixture
def runner() -> RecordingRunner:
    return RecordingRunner()


@pytest.fixture
def context(runner: RecordingRunner) -> Iterator[ExecutionContext]:
    config = ray_fed.Config(backend="local")
    backend = Backend([runner], 1, runner.close)
    with ExecutionContext(config, backend) as context:
        yield context


def test_clients_stay_away_from_work_that_does_not_read_them(
    context: ExecutionContext, runner: RecordingRunner
) -> None:
    result = context.invoke(add_total, (1.0, [2.0, 3.0]))

    assert result == 6.0
    assert runner.before == [((np.float32(1), StoredClients(None, 0, 2)),)]


def test_merges_between_stages_take_partials_alone(
    context: ExecutionContext, runner: RecordingRunner
) -> None:
    result = context.invoke(square_of_total, [2.0, 3.0])

    assert result == 15.0
    assert [len(before) for before in runner.before] == [0, 2]


def test_clients_stay_away_from_work_that_maps_them_for_nothing(
    context: ExecutionContext, runner: RecordingRunner
) -> None:
    parts: tuple[Any, Any, Any] = (total, add, merged_alone)

    result = context.invoke(MergeableCompForm(*parts), [2.0, 3.0])

    assert result == 5.0
    assert runner.before == [(StoredClients(None, 0, 2),)]
