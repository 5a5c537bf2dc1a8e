"""How tests call computations on executors."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias

import federated_language as fl
import pytest

Evaluate: TypeAlias = Callable[..., Any]
"""Takes an executor, a computation and its arguments; returns Python containers."""


async def _evaluate(executor: fl.framework.Executor, comp: Any, *args: Any) -> Any:
    function = await executor.create_value(comp)
    type_spec: Any = function.type_signature
    argument = None
    if type_spec.parameter is not None:
        arg = args[0] if len(args) == 1 else args
        argument = await executor.create_value(arg, type_spec.parameter)
    called = await executor.create_call(function, argument)
    computed = await called.compute()
    return fl.framework.type_to_py_container(computed, comp.type_signature.result)


@pytest.fixture
def evaluate() -> Evaluate:
    """Embeds a computation and its arguments, calls it, computes the result."""

    def run(executor: fl.framework.Executor, comp: Any, *args: Any) -> Any:
        return asyncio.run(_evaluate(executor, comp, *args))

    return run
