"""Selection and secure sums through compiled forms, on every backend."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.contexts.factory import ExecutionContext
from ray_fed.executors.stack import thread_debugging_executor_factory

ContextFactory = Callable[..., ExecutionContext]
Invoke = Callable[[Any, Any], Any]

INTEGERS = fl.FederatedType(np.int32, fl.CLIENTS)
KEYS = fl.FederatedType(fl.TensorType(np.int32, [2]), fl.CLIENTS)
TABLE = fl.FederatedType(fl.TensorType(np.float32, [4]), fl.SERVER)


@rtf.computation(fl.TensorType(np.float32, [4]), np.int32)
def pick(table: Any, key: Any) -> Any:
    return table[key]


@fl.federated_computation(INTEGERS)
def sum_of_at_most_ten(values: Any) -> Any:
    return fl.federated_secure_sum(values, 10)


@fl.federated_computation(INTEGERS)
def sum_of_pairs(values: Any) -> Any:
    return fl.federated_secure_sum(fl.federated_zip([values, values]), 10)


@fl.federated_computation(INTEGERS)
def sum_of_four_bits(values: Any) -> Any:
    return fl.federated_secure_sum_bitwidth(values, 4)


@fl.federated_computation(KEYS, TABLE)
def selected(keys: Any, table: Any) -> Any:
    return fl.federated_select(keys, fl.federated_value(3, fl.SERVER), table, pick)


@fl.federated_computation(KEYS, TABLE)
def securely_selected(keys: Any, table: Any) -> Any:
    largest = fl.federated_value(3, fl.SERVER)
    return fl.federated_secure_select(keys, largest, table, pick)


@pytest.fixture(
    params=["local", "debugging", pytest.param("ray", marks=pytest.mark.ray)]
)
def invoke(request: pytest.FixtureRequest) -> Iterator[Invoke]:
    if request.param == "debugging":
        factory = thread_debugging_executor_factory()
        yield fl.framework.SyncExecutionContext(factory).invoke
        for number in range(4):
            factory.clean_up_executor({fl.CLIENTS: number})
        return
    contexts: ContextFactory = request.getfixturevalue(f"{request.param}_contexts")
    yield contexts(workers=2, subrounds=3).invoke


@pytest.mark.claim("semantics.56", "semantics.57")
@pytest.mark.parametrize(
    ("comp", "expected"),
    [
        pytest.param(sum_of_at_most_ten, 6, id="one bound"),
        pytest.param(sum_of_pairs, [6, 6], id="a bound for each tensor"),
        pytest.param(sum_of_four_bits, 6, id="bitwidth"),
    ],
)
def test_secure_sum_is_the_sum(invoke: Invoke, comp: Any, expected: Any) -> None:
    assert invoke(comp, [1, 2, 3]) == expected


@pytest.mark.claim("semantics.59")
@pytest.mark.parametrize(
    ("comp", "values"),
    [
        pytest.param(sum_of_at_most_ten, [1, 2, 11], id="above the maximum"),
        pytest.param(sum_of_four_bits, [1, 2, 16], id="too many bits"),
        pytest.param(sum_of_four_bits, [1, 2, -1], id="negative"),
    ],
)
def test_secure_sum_names_the_client_that_breaks_its_bound(
    invoke: Invoke, comp: Any, values: list[int]
) -> None:
    with pytest.raises(errors.ComputationError, match=r"at most 1[05] .*client 2"):
        invoke(comp, values)


@pytest.mark.claim("semantics.58")
@pytest.mark.parametrize("comp", [selected, securely_selected], ids=["plain", "secure"])
def test_each_client_gets_what_its_keys_select(invoke: Invoke, comp: Any) -> None:
    keys = [np.array(pair, np.int32) for pair in ([3, 0], [1, 1], [2, 3])]
    table = np.array([0.5, 1.5, 2.5, 3.5], np.float32)

    result = invoke(comp, (keys, table))

    assert result == [[3.5, 0.5], [1.5, 1.5], [2.5, 3.5]]


def test_key_beyond_the_largest_names_the_client(invoke: Invoke) -> None:
    keys = [np.array(pair, np.int32) for pair in ([3, 0], [1, 4])]

    with pytest.raises(errors.ComputationError, match=r"from 0 to max_key=3.*client"):
        invoke(selected, (keys, np.zeros(4, np.float32)))


@pytest.mark.claim("semantics.59")
def test_first_secure_sum_says_that_it_is_simulated(
    local_contexts: ContextFactory, caplog: pytest.LogCaptureFixture
) -> None:
    context = local_contexts(workers=1)

    with caplog.at_level(logging.WARNING, "ray_fed"):
        context.invoke(sum_of_at_most_ten, [1])
        context.invoke(sum_of_four_bits, [1])

    said = [record for record in caplog.records if "in the clear" in record.message]
    assert len(said) == 1
