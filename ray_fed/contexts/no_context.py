"""What federated_language says where no context is installed, and what to do then.

Its own context for that says only "No default context installed". Every thread starts
with it, also one that starts after `init` was called in another.
"""

from typing import Any, NoReturn

from federated_language.context_stack import runtime_error_context

import ray_fed.errors as errors


def _say_what_to_do(self: object, comp: Any, arg: Any) -> NoReturn:
    del self, comp, arg
    raise errors.ContextStateError(
        "Expected a context that runs computations, found none (No default context"
        " installed): call `ray_fed.init()` in this thread. A context belongs to the"
        " thread that installed it: where another thread has called `init`, call it"
        " here with the same arguments."
    )


def explain() -> None:
    """Make calls without a context raise an error that says what to do."""
    runtime_error_context.RuntimeErrorContext.invoke = _say_what_to_do
