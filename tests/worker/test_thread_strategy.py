"""Clients on executors of this process: by index, lazily, and with the same bits."""

# pyright: reportUnknownLambdaType=false

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.language import blocks
from ray_fed.plan import merge_tree
from ray_fed.worker.stacks import LocalStrategy

FLOAT = fl.TensorType(np.float32)
AT_CLIENTS = fl.FederatedType(np.float32, fl.CLIENTS)
ALL_EQUAL = fl.FederatedType(np.float32, fl.CLIENTS, all_equal=True)


def function(comp: Any) -> blocks.Function:
    return blocks.Function(comp.to_proto().SerializeToString(deterministic=True))


ADD = function(rtf.computation(lambda x, y: x + y, np.float32, np.float32))
SHIFT_AND_ADD = function(
    rtf.computation(lambda x, y: 10 * x + y, np.float32, np.float32)
)


def must_be_positive(x: Any) -> Any:
    with tf.control_dependencies([tf.debugging.Assert(x > 0, ["not positive"])]):
        return tf.identity(x)


POSITIVE = function(rtf.computation(must_be_positive, np.float32))


class Target(EagerTFExecutor):
    """Notes what it embeds; is slow on a value that it is told."""

    def __init__(self, slow_value: float | None = None) -> None:
        super().__init__()
        self.embedded: list[Any] = []
        self.called: list[float] = []
        self.is_closed = False
        self._slow_value = slow_value

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        if not isinstance(value, blocks.Function):
            self.embedded.append(value)
        return await super().create_value(value, type_spec)

    @override
    async def create_call(self, comp: Any, arg: Any = None) -> Any:
        if arg is not None and isinstance(arg.reference, tf.Tensor):
            if arg.reference.numpy() == self._slow_value:
                await asyncio.sleep(0.02)
            self.called.append(float(arg.reference.numpy()))
        return await super().create_call(comp, arg)

    @override
    def close(self) -> None:
        self.is_closed = True
        super().close()


Build = Callable[..., LocalStrategy]


@pytest.fixture
def targets() -> list[Target]:
    """The targets of the strategy that `build` builds."""
    return []


@pytest.fixture
def build(targets: list[Target]) -> Iterator[Build]:
    strategies: list[LocalStrategy] = []

    def make(
        sizes: Sequence[int],
        clients_per_leaf: int | None = None,
        slow_value: float | None = None,
    ) -> LocalStrategy:
        stops = np.cumsum([0, *sizes]).tolist()
        groups = [range(*pair) for pair in itertools.pairwise(stops)]
        targets.extend(Target(slow_value) for _ in groups)
        strategy = LocalStrategy(EagerTFExecutor(), targets, groups, clients_per_leaf)
        strategies.append(strategy)
        return strategy

    yield make
    for strategy in strategies:
        strategy.close()


async def reduce(
    strategy: LocalStrategy,
    members: Any,
    accumulate: blocks.Function = ADD,
    merge: blocks.Function = ADD,
    zero: float = 0.0,
) -> Any:
    placed = await strategy.place(members, AT_CLIENTS)
    start = await EagerTFExecutor().create_value(zero, FLOAT)
    reduced = await strategy.reduce(placed, start, accumulate, merge)
    return await reduced.compute()


class TestPlace:
    def test_embeds_nothing_before_it_is_needed_and_then_once(
        self, build: Build, targets: list[Target]
    ) -> None:
        strategy = build([2])
        counts: list[int] = []

        async def act() -> None:
            placed = await strategy.place([1.0, 2.0], AT_CLIENTS)
            counts.append(len(targets[0].embedded))
            for _ in range(2):
                await placed.compute()
                counts.append(len(targets[0].embedded))

        asyncio.run(act())

        assert counts == [0, 2, 2]

    @pytest.mark.parametrize("is_embedded", [False, True], ids=["bare", "embedded"])
    def test_embeds_an_all_equal_value_once_a_group(
        self, build: Build, targets: list[Target], is_embedded: bool
    ) -> None:
        strategy = build([2, 3])

        async def act() -> Any:
            value: Any = 5.0
            if is_embedded:
                value = await EagerTFExecutor().create_value(value, FLOAT)
            return await (await strategy.place(value, ALL_EQUAL)).compute()

        computed = asyncio.run(act())

        assert computed == [5.0] * 5
        assert [target.embedded for target in targets] == [[5.0], [5.0]]


class TestMap:
    def test_ends_the_other_groups_when_a_client_fails(
        self, build: Build, targets: list[Target]
    ) -> None:
        strategy = build([1, 3], slow_value=1.0)

        async def act() -> int:
            placed = await strategy.place([-1.0, 1.0, 2.0, 3.0], AT_CLIENTS)
            with pytest.raises(errors.ComputationError):
                await strategy.map(POSITIVE, placed, FLOAT)
            return len(asyncio.all_tasks())

        num_tasks = asyncio.run(act())

        assert num_tasks == 1
        assert targets[1].called == []


class TestReduce:
    @pytest.mark.claim("semantics.60")
    @pytest.mark.parametrize("clients_per_leaf", [1, 2, 3, 7, 10])
    def test_accumulates_in_client_order_and_merges_by_the_tree(
        self, build: Build, clients_per_leaf: int
    ) -> None:
        strategy = build([3, 4], clients_per_leaf)
        members = [float(n) for n in range(1, 8)]

        result = asyncio.run(reduce(strategy, members, SHIFT_AND_ADD))

        leaves = merge_tree.cut_leaves(7, clients_per_leaf)
        digits = ["".join(str(n + 1) for n in leaf) for leaf in leaves]
        assert result == sum(int(leaf) for leaf in digits)


@pytest.mark.claim("eager_tf.33", "federating.11")
def test_close_closes_every_target(build: Build, targets: list[Target]) -> None:
    strategy = build([1, 1])

    strategy.close()

    assert [target.is_closed for target in targets] == [True, True]
