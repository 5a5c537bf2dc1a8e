"""A strategy says which placements and intrinsics it implements, and how."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
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


class AtServer:
    """A strategy's own class for values at the server."""

    def __init__(self, value: flf.ExecutorValue) -> None:
        self._value = value

    async def compute(self) -> Any:
        return await self._value.compute()


class WithOwnServerValues(LocalStrategy):
    """Represents values at the server in its own way, and notes what it places."""

    placed_at_server = 0

    @override
    async def place(self, value: Any, type_spec: fl.FederatedType) -> Any:
        if type_spec.placement == fl.SERVER:
            assert isinstance(value, flf.ExecutorValue)
            self.placed_at_server += 1
            return AtServer(value)
        return await super().place(value, type_spec)


@federated_computation(AT_CLIENTS)
def summed(values: Any) -> Any:
    return fl.federated_sum(values)


@federated_computation(AT_CLIENTS)
def averaged(values: Any) -> Any:
    return fl.federated_mean(values)


@federated_computation(AT_CLIENTS)
def applied(values: Any) -> Any:
    return fl.federated_map(double, fl.federated_sum(values))


@federated_computation(AT_CLIENTS)
def broadcast(values: Any) -> Any:
    total = fl.federated_broadcast(fl.federated_sum(values))
    return fl.federated_sum(fl.federated_zip((values, total)))


@rtf.computation
def seven() -> Any:
    return np.float32(7)


@federated_computation(AT_CLIENTS)
def evaluated(values: Any) -> Any:
    del values
    return fl.federated_eval(seven, fl.SERVER)


@rtf.computation(np.float32)
def to_int(x: Any) -> Any:
    return tf.cast(x, tf.int32)


@federated_computation(AT_CLIENTS)
def bounded(values: Any) -> Any:
    limit = fl.federated_value(np.int32(200), fl.SERVER)
    return fl.federated_secure_sum(fl.federated_map(to_int, values), 200), limit


@pytest.fixture
def own_values() -> Iterator[tuple[flf.Executor, WithOwnServerValues]]:
    targets = stacks.threaded_stacks(2)
    made: list[WithOwnServerValues] = []

    def make(executor: FederatingExecutor) -> WithOwnServerValues:
        made.append(WithOwnServerValues(executor.unplaced, targets[:1], [range(5)]))
        return made[0]

    stack = ReferenceResolvingExecutor(FederatingExecutor(make, targets[1]))
    yield stack, made[0]
    stack.close()


@pytest.mark.claim("federating.04")
@pytest.mark.parametrize(
    ("comp", "expected", "num_placed"),
    [
        pytest.param(summed, 114.0, 1, id="federated_sum"),
        pytest.param(averaged, np.float32(22.8), 1, id="federated_mean"),
        pytest.param(evaluated, 7.0, 1, id="federated_eval"),
        pytest.param(applied, 228.0, 2, id="federated_apply"),
        pytest.param(bounded, (114, 200), 2, id="federated_secure_sum"),
        pytest.param(broadcast, (114.0, 570.0), 2, id="federated_broadcast"),
    ],
)
def test_strategy_represents_results_at_the_server(
    own_values: tuple[flf.Executor, WithOwnServerValues],
    comp: Any,
    expected: Any,
    num_placed: int,
) -> None:
    executor, strategy = own_values

    result = evaluate(executor, comp.to_building_block(), CLIENTS)

    assert result == expected
    assert strategy.placed_at_server == num_placed


class ClientsAlone(LocalStrategy):
    """Has no server."""

    placements = frozenset({fl.CLIENTS})


@pytest.mark.claim("federating.06")
@pytest.mark.parametrize("comp", [summed, averaged, evaluated, applied])
def test_results_at_a_placement_that_the_strategy_lacks_are_refused(comp: Any) -> None:
    (target,) = stacks.threaded_stacks(1)
    stack = ReferenceResolvingExecutor(
        FederatingExecutor(
            lambda executor: ClientsAlone(executor.unplaced, [target], [range(5)]),
            target,
        )
    )

    with pytest.raises(ValueError, match=r"placed at one of \['CLIENTS'\], found"):
        evaluate(stack, comp.to_building_block(), CLIENTS)

    stack.close()
