"""A context over a leaf executor, so that tests call computations as users do."""

from collections.abc import Iterator
from typing import Any

import federated_language as fl
import pytest
from typing_extensions import override

from ray_fed.executors.eager_tf import EagerTFExecutor
from tests.executor_calls import evaluate


class LeafContext(fl.framework.SyncContext):
    """Runs one TensorFlow computation after another on one leaf executor."""

    def __init__(self) -> None:
        self._executor = EagerTFExecutor()

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        return evaluate(self._executor, comp, arg)

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
