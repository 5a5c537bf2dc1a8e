"""A context over a leaf executor, so that tests call computations as users do."""

import asyncio
from collections.abc import Iterator
from typing import Any

import federated_language as fl
import pytest
from typing_extensions import override

from ray_fed.executors.eager_tf import EagerTFExecutor


class LeafContext(fl.framework.SyncContext):
    """Runs one TensorFlow computation after another on one leaf executor."""

    def __init__(self) -> None:
        self._executor = EagerTFExecutor()

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        result = asyncio.run(self._invoke(comp, arg))
        return fl.framework.type_to_py_container(result, comp.type_signature.result)

    async def _invoke(self, comp: Any, arg: Any) -> Any:
        function = await self._executor.create_value(comp)
        parameter = comp.type_signature.parameter
        argument = None
        if parameter is not None:
            argument = await self._executor.create_value(arg, parameter)
        called = await self._executor.create_call(function, argument)
        return await called.compute()

    def close(self) -> None:
        """Drop what the executor caches."""
        self._executor.close()


@pytest.fixture(autouse=True)
def leaf_context() -> Iterator[LeafContext]:
    """Calls of computations in a test run on this context."""
    context = LeafContext()
    fl.framework.set_default_context(context)
    yield context
    fl.framework.set_no_default_context()
    context.close()
