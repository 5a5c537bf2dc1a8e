"""What takes the place of a default context that is closed."""

from typing import Any

import federated_language as fl
from typing_extensions import override

import ray_fed.errors as errors

flf = fl.framework


class ClosedContext(flf.SyncContext):
    """Says of every call that the context is closed."""

    @override
    def invoke(self, comp: Any, arg: Any) -> Any:
        raise errors.ContextStateError(
            "Expected an open context, found it closed: call ray_fed.init again."
        )
