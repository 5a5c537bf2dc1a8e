"""How tests call computations on executors, and the stacks that they run on."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import federated_language as fl
import pytest

from ray_fed.worker import stacks

Evaluate: TypeAlias = Callable[..., Any]
"""Takes an executor, a computation and its arguments; returns Python containers."""

StackFor: TypeAlias = Callable[..., fl.framework.Executor]
"""Takes a number of clients; returns an executor that the fixture closes."""


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


@pytest.fixture
def local_stack_for() -> Iterator[StackFor]:
    """Builds local stacks, each over leaves on threads of its own."""
    built: list[fl.framework.Executor] = []

    def build(
        num_clients: int, num_leaves: int = 2, clients_per_leaf: int | None = None
    ) -> fl.framework.Executor:
        leaves = stacks.threaded_leaves(num_leaves)
        unplaced = stacks.threaded_leaves(1)[0]
        executor = stacks.local_stack(num_clients, leaves, unplaced, clients_per_leaf)
        built.extend([executor, *leaves])
        return executor

    yield build
    for executor in built:
        executor.close()


@pytest.fixture
def debugging_stack_for() -> Iterator[StackFor]:
    """Builds debugging stacks, whose cardinality is inferred unless fixed."""
    cleaners: list[Callable[[], None]] = []

    def build(
        num_clients: int, *, clients_per_thread: int = 1, fixed: bool = False
    ) -> fl.framework.Executor:
        factory = stacks.thread_debugging_executor_factory(
            num_clients if fixed else None, clients_per_thread
        )
        cardinalities: Any = {} if fixed else {fl.CLIENTS: num_clients}
        executor = factory.create_executor(cardinalities)
        cleaners.append(lambda: factory.clean_up_executor(cardinalities))
        return executor

    yield build
    for clean_up in cleaners:
        clean_up()
