"""Building blocks of computations and their types: parsed, written, checked."""

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


# Every thread starts with federated_language's own context for "no context", which says
# only that none is installed: also a thread that starts after `init` was called.
runtime_error_context.RuntimeErrorContext.invoke = _say_what_to_do
