"""A strategy says which placements and intrinsics it implements, and how."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
from typing_extensions import override

import ray_fed.errors as errors
import ray_fed.worker.stacks as stacks
from ray_fed import tensorflow as rtf
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.worker.stacks import LocalStrategy
from tests.executor_calls import evaluate

flf = fl.framework
federated_computation = cast("Callable[..., Any]", fl.federated_computation)
AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
AT_SERVER = fl.FederatedType(np.float32, fl.SERVER)
CLIENTS = [8.0, 1.0, 3.0, 2.0, 100.0]
MEDIAN = flf.Intrinsic("federated_median", fl.FunctionType(AT_CLIENTS, AT_SERVER))
QUANTILE = flf.Intrinsic(
    "federated_quantile", fl.FunctionType([AT_CLIENTS, AT_SERVER], AT_SERVER)
)


class WithMedian(LocalStrategy):
    """Adds two intrinsics, replaces one, refuses one."""

    def __init__(self, executor: FederatingExecutor, targets: list[Any]) -> None:
        groups = [range(3), range(3, 5)]
        super().__init__(executor.unplaced, targets, groups)
        self._server = executor.unplaced
        self.intrinsics = {
            "federated_median": self.median,
            "federated_quantile": self.quantile,
            flf.FEDERATED_MAX.uri: self.median,
            flf.FEDERATED_SUM.uri: None,
        }

    async def median(self, values: Any, type_spec: fl.FunctionType) -> Any:
        found = np.median(np.array(await values.compute()))
        return await self._embed(found, type_spec)

    async def quantile(self, arg: Any, type_spec: fl.FunctionType) -> Any:
        values, level = arg
        found = np.quantile(np.array(await values.compute()), await level.compute())
        return await self._embed(found, type_spec)

    async def _embed(self, value: Any, type_spec: fl.FunctionType) -> Any:
        result: Any = type_spec.result
        return await self._server.create_value(np.float32(value), result.member)


@pytest.fixture
def executor() -> Iterator[flf.Executor]:
    targets = stacks.threaded_stacks(3)
    federating = FederatingExecutor(
        lambda executor: WithMedian(executor, targets[:2]), targets[2]
    )
    stack = ReferenceResolvingExecutor(federating)
    yield stack
    stack.close()


@rtf.computation(np.float32)
def double(x: Any) -> Any:
    return 2 * x


def test_intrinsic_of_its_own_is_computed(executor: flf.Executor) -> None:
    assert evaluate(executor, MEDIAN, CLIENTS) == 3.0


def test_takes_what_other_intrinsics_make_and_gives_them_what_it_makes(
    executor: flf.Executor,
) -> None:
    arg = flf.Reference("arg", AT_CLIENTS)
    doubling = double.to_building_block()
    mapped = flf.create_federated_map_or_apply(doubling, arg)
    found = flf.create_federated_map_or_apply(doubling, flf.Call(MEDIAN, mapped))

    assert evaluate(executor, flf.Lambda("arg", AT_CLIENTS, found), CLIENTS) == 12.0


def test_of_a_struct_is_given_each_element(executor: flf.Executor) -> None:
    assert evaluate(executor, QUANTILE, [CLIENTS, 1.0]) == 100.0


def test_replaces_the_meaning_that_all_strategies_share(
    executor: flf.Executor,
) -> None:
    @federated_computation(AT_CLIENTS)
    def largest(values: Any) -> Any:
        return fl.federated_max(values)

    assert evaluate(executor, largest.to_building_block(), CLIENTS) == 3.0


def test_all_others_keep_it(executor: flf.Executor) -> None:
    @federated_computation(AT_CLIENTS)
    def mean(values: Any) -> Any:
        return fl.federated_mean(values)

    found = evaluate(executor, mean.to_building_block(), CLIENTS)

    assert found == np.float32(22.8)


def test_refused_one_is_an_error_that_names_what_there_is(
    executor: flf.Executor,
) -> None:
    @federated_computation(AT_CLIENTS)
    def total(values: Any) -> Any:
        return fl.federated_sum(values)

    with pytest.raises(errors.UnsupportedError, match="federated_sum") as raised:
        evaluate(executor, total.to_building_block(), CLIENTS)

    listed = str(raised.value).partition("found")[0]
    assert "'federated_median'" in listed
    assert "'federated_sum'" not in listed


def test_unknown_one_is_an_error_without_a_strategy_that_adds_it() -> None:
    (leaf,) = stacks.threaded_stacks(1)
    with pytest.raises(errors.UnsupportedError, match="`federated_median`"):
        evaluate(stacks.local_stack(5, [leaf], leaf), MEDIAN, CLIENTS)
    leaf.close()


REGIONS = flf.PlacementLiteral(
    "REGIONS", "regions", default_all_equal=False, description="Some clients each."
)
AT_REGIONS = fl.FederatedType(np.float32, REGIONS)


class OfRegions:
    """A value for each region, where the strategy keeps it."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    async def compute(self) -> list[float]:
        return self.values


class WithRegions(WithMedian):
    """Has a placement of its own, and notes what is placed at the server."""

    placements = frozenset({fl.CLIENTS, fl.SERVER, REGIONS})

    def __init__(self, executor: FederatingExecutor, targets: list[Any]) -> None:
        super().__init__(executor, targets)
        self.at_server: list[Any] = []
        self.intrinsics = {"regional_sums": self.sums, "largest_region": self.largest}

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Any:
        if type_spec.placement == REGIONS:
            return OfRegions([float(v) for v in value])
        if type_spec.placement == fl.SERVER:
            self.at_server.append(await value.compute())
        return await super().place(value, type_spec)

    async def sums(self, values: Any, _: fl.FunctionType) -> Any:
        of_clients = np.array(await values.compute())
        return OfRegions([float(of_clients[:3].sum()), float(of_clients[3:].sum())])

    async def largest(self, regions: Any, type_spec: fl.FunctionType) -> Any:
        return await self._embed(max(regions.values), type_spec)


@pytest.fixture
def regional() -> Iterator[tuple[flf.Executor, WithRegions]]:
    targets = stacks.threaded_stacks(3)
    federating = FederatingExecutor(
        lambda executor: WithRegions(executor, targets[:2]), targets[2]
    )
    stack = ReferenceResolvingExecutor(federating)
    yield stack, cast("WithRegions", federating.strategy)
    stack.close()


def test_placement_of_its_own_has_values_and_intrinsics(
    regional: tuple[flf.Executor, WithRegions],
) -> None:
    executor, _ = regional
    sums = flf.Intrinsic("regional_sums", fl.FunctionType(AT_CLIENTS, AT_REGIONS))
    largest = flf.Intrinsic("largest_region", fl.FunctionType(AT_REGIONS, AT_SERVER))
    arg = flf.Reference("arg", AT_CLIENTS)
    chained = flf.Lambda("arg", AT_CLIENTS, flf.Call(largest, flf.Call(sums, arg)))

    assert evaluate(executor, sums, CLIENTS) == [12.0, 102.0]
    assert evaluate(executor, largest, [7.0, 5.0]) == 7.0
    assert evaluate(executor, chained, CLIENTS) == 102.0


def test_is_asked_for_values_at_the_server(
    regional: tuple[flf.Executor, WithRegions],
) -> None:
    executor, strategy = regional

    @federated_computation(AT_SERVER)
    def add_two(x: Any) -> Any:
        two = fl.federated_value(np.float32(2.0), fl.SERVER)
        return fl.federated_zip((x, two))

    assert list(evaluate(executor, add_two.to_building_block(), 5.0)) == [5.0, 2.0]
    assert [float(v) for v in strategy.at_server[:2]] == [5.0, 2.0]


def test_placement_that_it_lacks_is_an_error(executor: flf.Executor) -> None:
    class AtServer(LocalStrategy):
        placements = frozenset({fl.SERVER})

    def factory(executor: FederatingExecutor) -> FederatingStrategy:
        return AtServer(executor.unplaced, [], [])

    (leaf,) = stacks.threaded_stacks(1)
    federating = FederatingExecutor(factory, leaf)

    with pytest.raises(errors.UnsupportedError, match=r"\['SERVER'\]"):
        asyncio.run(federating.create_value([1.0], AT_CLIENTS))
    federating.close()
