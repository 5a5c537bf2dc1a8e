"""The top of a stack that nothing above it seeds: keys the random numbers of calls."""

import itertools
from typing import Any

import federated_language as fl
from typing_extensions import override

from ray_fed.plan import random_keys


class SeededExecutor(fl.framework.Executor):
    """Delegates every verb to a target, with the numbers that it draws keyed.

    Each embedding and each call draws from a key of the seed and of the count of such
    verbs before it, so the same verbs in the same order draw the same numbers.

    Args:
        target_executor: runs everything; owned: `close` closes it.
        seed: of all random numbers.
        count: yields how many verbs there were, shared by the stacks of one seed.
    """

    def __init__(
        self,
        target_executor: fl.framework.Executor,
        seed: int,
        count: "itertools.count[int]",
    ) -> None:
        self._target = target_executor
        self._seed = seed
        self._count = count

    @override
    def close(self) -> None:
        self._target.close()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        with random_keys.using(random_keys.DrawKey(self._seed, next(self._count))):
            return await self._target.create_value(value, type_spec)

    @override
    async def create_call(
        self,
        comp: fl.framework.ExecutorValue,
        arg: fl.framework.ExecutorValue | None = None,
    ) -> Any:
        with random_keys.using(random_keys.DrawKey(self._seed, next(self._count))):
            return await self._target.create_call(comp, arg)

    @override
    async def create_struct(self, elements: Any) -> Any:
        return await self._target.create_struct(elements)

    @override
    async def create_selection(self, source: Any, index: int) -> Any:
        return await self._target.create_selection(source, index)
