"""Calls of executors, each on a new event loop."""

import asyncio
from typing import Any

import federated_language as fl


def embed(executor: fl.framework.Executor, value: Any, type_spec: Any = None) -> Any:
    """Embed a value in an executor."""
    return asyncio.run(executor.create_value(value, type_spec))


def computed(value: fl.framework.ExecutorValue) -> Any:
    """Return the value of an embedded value."""
    return asyncio.run(value.compute())


async def invoke(executor: fl.framework.Executor, comp: Any, arg: Any = None) -> Any:
    """Embed a computation and its argument, call it, and return the result's value."""
    function = await executor.create_value(comp)
    type_spec: Any = function.type_signature
    argument = None
    if type_spec.parameter is not None:
        argument = await executor.create_value(arg, type_spec.parameter)
    return await (await executor.create_call(function, argument)).compute()


def evaluate(executor: fl.framework.Executor, comp: Any, *args: Any) -> Any:
    """Return the result of a computation in the Python containers of its type."""
    arg = args[0] if len(args) == 1 else args
    result = asyncio.run(invoke(executor, comp, arg))
    return fl.framework.type_to_py_container(result, comp.type_signature.result)
