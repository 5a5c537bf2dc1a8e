"""Contexts that several modules of tests run on."""

from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import pytest

from ray_fed.contexts.execution_context import ExecutionContext
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory

ContextFactory = Callable[..., ExecutionContext]


@pytest.fixture
def build(request: pytest.FixtureRequest) -> ContextFactory:
    """Builds contexts of the module's `SETTINGS`, on threads or as `EACH_BACKEND`."""
    backend = getattr(request, "param", "local")
    contexts = request.getfixturevalue(f"{backend}_contexts")

    def make(**settings: Any) -> ExecutionContext:
        return contexts(**request.module.SETTINGS | settings)

    return make


@pytest.fixture(params=["local", "debugging"])
def invoke(
    request: pytest.FixtureRequest, local_contexts: ContextFactory
) -> Iterator[Callable[[Any, Any], Any]]:
    """Calls computations on a context, and on the debugging stack."""
    if request.param == "debugging":
        factory = thread_debugging_executor_factory()
        yield fl.framework.SyncExecutionContext(factory).invoke
        for number in range(5):
            factory.clean_up_executor({fl.CLIENTS: number})
        return
    yield local_contexts(workers=2, subrounds=2).invoke
