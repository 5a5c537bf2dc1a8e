"""Reads, writes and checks computations of federated_language and their types.

Importing this package patches federated_language: if a user's call of a computation
fails, the error says what to do, and the traceback is short.
"""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import federated_language as fl
from federated_language.context_stack import runtime_error_context

import ray_fed.errors as errors
import ray_fed.tracebacks as tracebacks

flf = fl.framework


def _say_what_to_do(self: object, comp: Any, arg: Any) -> NoReturn:
    del self, comp, arg
    raise errors.ContextStateError(
        "Expected a context that runs computations, found none (No default context"
        " installed): call `ray_fed.init()` in this thread. A context belongs to the"
        " thread that installed it: where another thread has called `init`, call it"
        " here with the same arguments."
    )


# Every thread starts with federated_language's context for "no context", even a thread
# that starts after `init` was called. Its error does not say what to do.
runtime_error_context.RuntimeErrorContext.invoke = _say_what_to_do

_make: Callable[..., Any] = flf.ComputationWrapper.__call__


@tracebacks.shorten
def _make_computation(self: Any, *args: Any, **options: Any) -> Any:
    made = _make(self, *args, **options)
    is_decorator = inspect.isfunction(made)
    return tracebacks.shorten(made) if is_decorator else made


_call: Callable[..., Any] = flf.ConcreteComputation.__call__


def _call_computation(self: Any, *args: Any, **named: Any) -> Any:
    try:
        return _call(self, *args, **named)
    except TypeError as error:
        if not str(error).startswith("Missing argument"):
            raise
        parameters = ", ".join(
            f"`{n}`" for n, _ in self.type_signature.parameter.items()
        )
        raise errors.ValueMismatchError(
            f"Expected an argument for each of {parameters}, found"
            f" {len(args) + len(named)}: pass them in this order, or by name."
        ) from None


flf.ConcreteComputation.__call__ = _call_computation

# The objects of federated_language that users call: computations, and their decorator.
_called: list[Any] = [flf.ConcreteComputation, flf.PolymorphicComputation]
for _cls in _called:
    _cls.__call__ = tracebacks.shorten(_cls.__call__)
flf.ComputationWrapper.__call__ = _make_computation
