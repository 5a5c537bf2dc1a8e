"""Data sets that all clients share are read by each client, as far as it needs."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf

import ray_fed.worker.stacks as stacks
from ray_fed import framework
from ray_fed import tensorflow as rtf
from tests.executor_calls import evaluate

flf = fl.framework
federated_computation = cast("Callable[..., Any]", fl.federated_computation)
NUM_CLIENTS = 3
NUMBERS = fl.SequenceType(np.int64)
NAMED = fl.StructType([("scale", np.int64), ("numbers", NUMBERS)])
AT_SERVER = fl.FederatedType(NUMBERS, fl.SERVER)
SUM_OF_FIVE = sum(range(5))


def endless() -> Any:
    return tf.data.Dataset.counter()


@rtf.computation(NUMBERS)
def add_five(numbers: Any) -> Any:
    return numbers.take(5).reduce(np.int64(0), lambda total, number: total + number)


@rtf.computation(NAMED)
def add_scaled(client: Any) -> Any:
    five = client["numbers"].take(5)
    return client["scale"] * five.reduce(np.int64(0), lambda total, x: total + x)


@rtf.computation(NUMBERS)
def double(numbers: Any) -> Any:
    return numbers.map(lambda number: 2 * number)


@rtf.computation
def count() -> Any:
    return tf.data.Dataset.counter()


@federated_computation(fl.FederatedType(NUMBERS, fl.CLIENTS, all_equal=True))
def of_all_equal(numbers: Any) -> Any:
    return fl.federated_map(add_five, numbers)


@federated_computation(fl.FederatedType(NAMED, fl.CLIENTS, all_equal=True))
def of_all_equal_struct(client: Any) -> Any:
    return fl.federated_map(add_scaled, client)


@federated_computation(fl.FederatedType(NAMED, fl.CLIENTS))
def of_each_client(client: Any) -> Any:
    return fl.federated_map(add_scaled, client)


@federated_computation(AT_SERVER)
def of_broadcast(numbers: Any) -> Any:
    return fl.federated_map(add_five, fl.federated_broadcast(numbers))


@federated_computation(AT_SERVER)
def of_broadcast_result(numbers: Any) -> Any:
    doubled = fl.federated_broadcast(fl.federated_map(double, numbers))
    return fl.federated_map(add_five, doubled)


@federated_computation(fl.FederatedType(NAMED, fl.SERVER))
def of_broadcast_struct(client: Any) -> Any:
    return fl.federated_map(add_scaled, fl.federated_broadcast(client))


@federated_computation
def of_eval() -> Any:
    return fl.federated_map(
        add_five, fl.federated_broadcast(fl.federated_eval(count, fl.SERVER))
    )


@pytest.fixture(params=["local stack", "debugging stack"])
def executor(request: pytest.FixtureRequest) -> Iterator[flf.Executor]:
    if request.param == "debugging stack":
        factory = framework.thread_debugging_executor_factory(NUM_CLIENTS)
        yield factory.create_executor({})
        factory.clean_up_executor({})
    else:
        targets = stacks.threaded_stacks(3)
        stack = stacks.local_stack(NUM_CLIENTS, targets[:2], targets[2])
        yield stack
        stack.close()


@pytest.mark.claim("eager_tf.19", "debugging.06")
@pytest.mark.parametrize(
    ("comp", "make", "expected"),
    [
        pytest.param(of_all_equal, endless, SUM_OF_FIVE, id="all-equal"),
        pytest.param(
            of_all_equal_struct,
            lambda: {"scale": 3, "numbers": endless()},
            3 * SUM_OF_FIVE,
            id="all-equal struct",
        ),
        pytest.param(
            of_each_client,
            lambda: [{"scale": 3, "numbers": endless()} for _ in range(NUM_CLIENTS)],
            3 * SUM_OF_FIVE,
            id="struct of each client",
        ),
        pytest.param(of_broadcast, endless, SUM_OF_FIVE, id="broadcast"),
        pytest.param(of_broadcast_result, endless, 2 * SUM_OF_FIVE, id="result"),
        pytest.param(
            of_broadcast_struct,
            lambda: {"scale": 3, "numbers": endless()},
            3 * SUM_OF_FIVE,
            id="broadcast struct",
        ),
        pytest.param(of_eval, None, SUM_OF_FIVE, id="federated_eval"),
    ],
)
def test_endless_dataset_is_read_as_far_as_clients_need(
    executor: flf.Executor,
    comp: Any,
    make: Callable[[], Any] | None,
    expected: int,
) -> None:
    args = [] if make is None else [make()]

    result = evaluate(executor, comp.to_building_block(), *args)

    assert result == [expected] * NUM_CLIENTS
