"""Claims of the FederatingExecutor's document that no other test holds."""

# pyright: reportUnknownLambdaType=false

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.framework as framework
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.interpretation import FederatedValue
from ray_fed.framework import FederatingExecutor, ReferenceResolvingExecutor
from tests.executor_calls import embed, evaluate

flf = fl.framework

INT = fl.TensorType(np.int32)
PAIR = fl.StructType([("z", np.int32), ("a", np.int32)])
AT_CLIENTS = fl.FederatedType(np.int32, fl.CLIENTS)
MAP = fl.FunctionType([fl.FunctionType(INT, INT), AT_CLIENTS], AT_CLIENTS)


@rtf.computation(np.int32)
def increment(x: Any) -> Any:
    return x + 1


@rtf.computation(np.int32, np.int32)
def add(x: Any, y: Any) -> Any:
    return x + y


class Reversed:
    """Client values as one strategy might keep them: the last client first."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members
        self.member = INT

    async def compute(self) -> list[Any]:
        return self.members[::-1]


class ForeignStrategy(framework.FederatingStrategy):
    """Keeps values in a way of its own, and cannot reduce.

    Args:
        target: what clients run on; it is told the largest first.
    """

    num_clients = 3

    def __init__(self, target: flf.Executor) -> None:
        self.target = target
        self.is_closed = False

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Any:
        if type_spec.placement == fl.SERVER:
            return value
        return Reversed([np.int32(member) for member in value[::-1]])

    @override
    async def map(self, function: Any, arg: Any, member: fl.Type) -> Any:
        embedded = await self.target.create_value(function)
        results: list[Any] = []
        for client in arg.members:
            value = await self.target.create_value(client, arg.member)
            called = await self.target.create_call(embedded, value)
            results.append(await called.compute())
        return Reversed(results)

    @override
    async def reduce(self, arg: Any, zero: Any, accumulate: Any, merge: Any) -> Any:
        raise errors.MissingIntrinsicError("Expected no reduction, found one.")

    @override
    def close(self) -> None:
        self.is_closed = True
        self.target.close()


class Target(EagerTFExecutor):
    """Notes every value that it embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded: list[Any] = []
        self.is_closed = False

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        self.embedded.append(value)
        return await super().create_value(value, type_spec)

    @override
    def close(self) -> None:
        self.is_closed = True
        super().close()


@pytest.fixture
def client_target() -> Target:
    return Target()


@pytest.fixture
def unplaced() -> Target:
    return Target()


@pytest.fixture
def executor(client_target: Target, unplaced: Target) -> Iterator[FederatingExecutor]:
    executor = FederatingExecutor(
        strategy_factory=lambda _: ForeignStrategy(client_target),
        unplaced_executor=unplaced,
    )
    yield executor
    executor.close()


def mapped(executor: FederatingExecutor, members: list[int]) -> Any:
    async def act() -> Any:
        function = await executor.create_value(flf.FEDERATED_MAP, MAP)
        values_ = await executor.create_value(members, AT_CLIENTS)
        pair = [await executor.create_value(increment), values_]
        return await executor.create_call(function, await executor.create_struct(pair))

    return asyncio.run(act())


@pytest.mark.claim(
    "federating.01",
    "federating.03",
    "federating.04",
    "federating.05",
    "federating.09",
    "federating.11",
)
def test_strategy_keeps_values_as_it_likes_and_has_targets_run_clients(
    executor: FederatingExecutor, client_target: Target, unplaced: Target
) -> None:
    placed = embed(executor, [1, 2, 3], AT_CLIENTS)
    result = mapped(executor, [1, 2, 3])
    executor.close()

    assert isinstance(placed.reference, Reversed)
    assert placed.reference.members == [3, 2, 1]
    assert result.reference.members == [4, 3, 2]
    assert asyncio.run(result.compute()) == [2, 3, 4]
    assert client_target.embedded[1:] == [3, 2, 1]
    assert unplaced.embedded == []
    assert client_target.is_closed
    assert unplaced.is_closed


@pytest.mark.claim("federating.07")
def test_what_has_no_placement_runs_on_the_unplaced_executor(
    executor: FederatingExecutor, client_target: Target, unplaced: Target
) -> None:
    async def act() -> Any:
        function = await executor.create_value(increment)
        argument = await executor.create_value(4, INT)
        return await (await executor.create_call(function, argument)).compute()

    assert asyncio.run(act()) == 5
    assert unplaced.embedded[0] == 4
    assert len(unplaced.embedded) == 2  # the function, when it is called
    assert client_target.embedded == []


@pytest.mark.claim("federating.02", "federating.08")
@pytest.mark.parametrize(
    "aggregation",
    [
        pytest.param(fl.federated_sum, id="sum"),
        pytest.param(fl.federated_max, id="max"),
        pytest.param(
            lambda x: fl.federated_aggregate(x, np.int32(0), add, add, increment),
            id="aggregate",
        ),
    ],
)
def test_what_the_strategy_does_not_implement_is_not_implemented(
    client_target: Target, unplaced: Target, aggregation: Callable[[Any], Any]
) -> None:
    """A strategy without `reduce` does maps, and refuses whatever aggregates."""
    federating = FederatingExecutor(lambda _: ForeignStrategy(client_target), unplaced)
    stack = ReferenceResolvingExecutor(federating)
    work = fl.federated_computation(
        lambda x: fl.federated_map(increment, x), AT_CLIENTS
    )
    aggregate = fl.federated_computation(aggregation, AT_CLIENTS)

    assert evaluate(stack, work, [1, 2, 3]) == [2, 3, 4]
    with pytest.raises(NotImplementedError, match="no reduction"):
        evaluate(stack, aggregate, [1, 2, 3])
    stack.close()


@pytest.mark.claim("federating.06")
@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "in a struct"])
def test_another_placement_is_refused(
    executor: FederatingExecutor, is_inside: bool
) -> None:
    elsewhere = flf.PlacementLiteral("EDGE", "edge", True, "Between the two.")
    at_edge: fl.Type = fl.FederatedType(np.int32, elsewhere)
    type_spec = fl.StructType([at_edge]) if is_inside else at_edge

    found = r"at one of \['CLIENTS', 'SERVER'\], found `int32@EDGE"
    with pytest.raises(ValueError, match=found):
        embed(executor, [1] if is_inside else 1, type_spec)


@pytest.mark.claim("federating.26")
def test_struct_of_an_unknown_kind_is_no_source(executor: FederatingExecutor) -> None:
    source = FederatedValue(object(), PAIR)

    ways: list[dict[str, Any]] = [{"index": 0}, {"name": "a"}]
    for how in ways:
        with pytest.raises(ValueError, match="a struct of embedded values, found"):
            asyncio.run(executor.create_selection(source, **how))
