"""An executor that seeds the random numbers of the executors below."""

import itertools
from typing import Any

import federated_language as fl
from typing_extensions import override

from ray_fed.plan import random_keys


class SeededExecutor(fl.framework.Executor):
    """Passes each call on to a target, and sets the key of the call's random numbers.

    The key has the seed and the number of earlier calls of `create_value` and
    `create_call`. So equal calls in equal order draw equal numbers. `count` counts the
    calls. Executors with the same seed share one `count`. `close` closes the target.
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
