"""Runs an executor on its own thread, so that callers do not block."""

import contextlib
from typing import Any

import federated_language as fl
from typing_extensions import override

from ray_fed.executors.loops import LoopThread


class ThreadDelegatingExecutor(fl.framework.Executor):
    """Passes each call on to a target executor, on a thread of its own.

    Returned values are the target's values. One executor runs its calls one after
    another. Several executors run their calls at the same time.

    Args:
        target_executor: Executor that runs on the thread. `close` closes it.
        name: Name of the thread.
        scope: Context manager that the thread enters when it starts and leaves at its
            end.
    """

    def __init__(
        self,
        target_executor: fl.framework.Executor,
        name: str = "ray_fed executor",
        scope: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._target = target_executor
        self._thread = LoopThread(name, scope)

    @override
    def close(self) -> None:
        self._thread.close()
        self._target.close()

    @override
    async def create_value(self, value: Any, type_spec: Any = None) -> Any:
        return await self._thread.run(self._target.create_value(value, type_spec))

    @override
    async def create_call(
        self,
        comp: fl.framework.ExecutorValue,
        arg: fl.framework.ExecutorValue | None = None,
    ) -> Any:
        return await self._thread.run(self._target.create_call(comp, arg))

    @override
    async def create_struct(self, elements: Any) -> Any:
        return await self._thread.run(self._target.create_struct(elements))

    @override
    async def create_selection(self, source: Any, index: int) -> Any:
        return await self._thread.run(self._target.create_selection(source, index))
