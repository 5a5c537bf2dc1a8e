"""Reads what a context is invoked with, before anything of it runs."""

from typing import Any

from ray_fed.compiler.binding import bind_functions
from ray_fed.compiler.form import function_type_of
from ray_fed.language import type_checks
from ray_fed.values import plain_values, read_limits


def read_invocation(comp: Any, arg: Any, limits: read_limits.Limits) -> tuple[Any, Any]:
    """Return a computation that takes no functions, and its argument as a plain value.

    Args:
        comp: a computation, or a `MergeableCompForm`.
        arg: its argument; where the parameter's type has functions, computations.
        limits: of what is read of the argument.

    Raises:
        TypeError: the argument is not of its type, or `comp` is no computation.
    """
    type_checks.check_no_argument(function_type_of(comp), arg)
    with read_limits.limited(limits):
        comp, arg = bind_functions(comp, arg)
        parameter = comp.type_signature.parameter
        if parameter is None:
            return comp, None
        return comp, plain_values.to_plain(arg, parameter, "the argument")
