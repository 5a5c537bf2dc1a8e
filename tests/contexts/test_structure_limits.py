"""Large and deep computations: long blocks, nested lets, wide structures."""

from typing import Any

import federated_language as fl
import numpy as np
import pytest

import ray_fed.errors as errors
from ray_fed import framework
from ray_fed import tensorflow as rtf
from ray_fed.contexts.execution_context import ExecutionContext
from tests.fixtures import ContextFactory, report_of

flf = fl.framework

INT = fl.TensorType(np.int32)
AT_CLIENTS = fl.FederatedType(INT, fl.CLIENTS)
AT_SERVER = fl.FederatedType(INT, fl.SERVER)
NUM_WIDE = 501
"""More than a kernel accumulates."""
WIDE = fl.StructType([(f"e{index}", INT) for index in range(NUM_WIDE)])


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation(WIDE)
def increment_all(x: Any) -> Any:
    return {f"e{index}": x[index] + 1 for index in range(NUM_WIDE)}


@pytest.fixture
def context(local_contexts: ContextFactory) -> ExecutionContext:
    return local_contexts(workers=2, subrounds=2)


def nested_lets(depth: int) -> flf.ComputationBuildingBlock:
    """Return (x -> let x = increment(x) in let x = increment(x) in ... x), so deep."""
    function = flf.ComputationBuildingBlock.from_proto(increment.to_proto())
    argument = flf.Reference("x", INT)
    body: flf.ComputationBuildingBlock = argument
    for _ in range(depth):
        body = flf.Block([("x", flf.Call(function, argument))], body)
    return flf.Lambda("x", INT, body)


def deep(depth: int) -> tuple[Any, Any]:
    """Return the type of an integer in so many structures, and such a value."""
    type_spec: Any = INT
    value: Any = 7
    for _ in range(depth):
        type_spec, value = fl.StructType([("a", type_spec)]), {"a": value}
    return type_spec, value


@pytest.mark.slow
@pytest.mark.parametrize(
    "placed", [AT_CLIENTS, AT_SERVER], ids=["at clients", "at the server"]
)
def test_chain_of_a_thousand_locals(context: ExecutionContext, placed: Any) -> None:
    @fl.federated_computation(placed)
    def comp(x: Any) -> Any:
        for _ in range(1000):
            x = fl.federated_map(increment, x)
        return x

    if placed is AT_CLIENTS:
        assert context.invoke(comp, [1, 2]) == [1001, 1002]
    else:
        assert context.invoke(comp, 1) == 1001


@pytest.mark.slow
def test_hundreds_of_locals_that_one_result_needs(context: ExecutionContext) -> None:
    @fl.federated_computation(AT_CLIENTS)
    def comp(x: Any) -> Any:
        return [fl.federated_map(increment, x) for _ in range(300)]

    result = context.invoke(comp, [1, 2])

    assert result == [[2, 3]] * 300


def test_forty_five_nested_lets(context: ExecutionContext) -> None:
    comp = flf.ConcreteComputation.from_building_block(nested_lets(45))

    assert context.invoke(comp, 0) == 45
    read = framework.deserialize_computation(framework.serialize_computation(comp))
    assert context.invoke(read, 0) == 45


def test_structures_nested_as_deep_as_messages_allow(
    context: ExecutionContext,
) -> None:
    type_spec, value = deep(30)

    @rtf.computation(type_spec)
    def comp(x: Any) -> Any:
        for _ in range(30):
            x = x["a"]
        return x + 1

    assert context.invoke(comp, value) == 8


def test_structures_beyond_the_limit_of_protobuf_say_so() -> None:
    type_spec, _ = deep(60)

    with pytest.raises(errors.CompileError, match="30 structures deep"):
        rtf.computation(lambda x: x, type_spec)  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.slow
def test_wide_structure_at_clients(
    context: ExecutionContext,
) -> None:
    @fl.federated_computation(fl.FederatedType(WIDE, fl.CLIENTS))
    def comp(x: Any) -> Any:
        return fl.federated_sum(fl.federated_map(increment_all, x))

    value = {f"e{index}": index for index in range(NUM_WIDE)}

    result = context.invoke(comp, [value, value])

    assert list(result.values()) == [2 * index + 2 for index in range(NUM_WIDE)]
    assert list(result) == [f"e{index}" for index in range(NUM_WIDE)]
    assert report_of(context).no_kernel == (f"{NUM_WIDE} tensors to accumulate",)


def test_structure_of_a_thousand_aggregates(context: ExecutionContext) -> None:
    @fl.federated_computation(AT_CLIENTS)
    def comp(x: Any) -> Any:
        total = fl.federated_sum(x)
        return fl.federated_zip([total] * 1000)

    assert context.invoke(comp, [1, 2]) == [3] * 1000
