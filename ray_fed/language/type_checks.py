"""Answers questions about federated types, and checks arguments of users."""

import functools
import numbers
from typing import TypeGuard, TypeVar, cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.language.structs import show

_T = TypeVar("_T")


_CACHED_TYPES = 1024
"""Size of each cache of answers, in types. Each call of a computation asks again."""


def is_at_clients(type_spec: fl.Type) -> bool:
    """Return whether the type is a federated type placed at clients."""
    return isinstance(type_spec, fl.FederatedType) and type_spec.placement == fl.CLIENTS


def is_at_server(type_spec: fl.Type) -> bool:
    """Return whether the type is a federated type placed at the server."""
    return isinstance(type_spec, fl.FederatedType) and type_spec.placement == fl.SERVER


def differs_by_client(type_spec: fl.Type) -> bool:
    """Return whether each client has its own value, so that the value is a list."""
    return isinstance(type_spec, fl.FederatedType) and not type_spec.all_equal


@functools.lru_cache(maxsize=_CACHED_TYPES)
def holds_clients(type_spec: fl.Type) -> bool:
    """Return whether some part of a type has a value of its own for each client."""
    return fl.framework.type_contains(type_spec, differs_by_client)


@functools.lru_cache(maxsize=_CACHED_TYPES)
def holds_functions(type_spec: fl.Type) -> bool:
    """Return whether some part of a type is a function."""
    return fl.framework.type_contains(
        type_spec, lambda part: isinstance(part, fl.FunctionType)
    )


@functools.lru_cache(maxsize=_CACHED_TYPES)
def _holds_placed(type_spec: fl.StructType) -> bool:
    return fl.framework.contains_federated_types(type_spec)


def is_placed_struct(type_spec: fl.Type) -> bool:
    """Return whether a type is a struct with parts placed at clients or the server."""
    return isinstance(type_spec, fl.StructType) and _holds_placed(type_spec)


def check_assignable(target: fl.Type, source: fl.Type, label: str) -> None:
    """Raise ValueMismatchError unless a value of type `source` can be a `target`.

    `label` names the value in the error message.
    """
    if not target.is_assignable_from(source):
        raise errors.ValueMismatchError(
            f"Expected {label} of type `{target}`, found `{source}`."
        )


def narrow(value: object, cls: type[_T], label: str) -> _T:
    """Return `value` if it is of the class of values of the executor named `label`.

    Raises ValueMismatchError if another executor created the value.
    """
    if not isinstance(value, cls):
        raise errors.ValueMismatchError(
            f"Expected a value embedded in {label}, found `{type(value).__name__}`:"
            " pass the result of its create_value."
        )
    return value


def check_kind(value: object, cls: type[_T], name: str) -> _T:
    """Return `value`, or raise ValueMismatchError if it is not a `cls`.

    `name` is the name of the user's argument, for the error message.
    """
    if not isinstance(value, cls):
        raise errors.ValueMismatchError(
            f"Expected `{name}` to be of the class `{cls.__name__}`, found"
            f" {show(value)}."
        )
    return value


def select_index(type_spec: fl.Type, index: int | None, name: str | None) -> int:
    """Return the index of the element of a struct type with an index or a name.

    Raises UnsupportedError unless exactly one of `index` and `name` is None, and
    ValueMismatchError if the type is not a struct or has no such element.
    """
    if (index is None) == (name is None):
        raise errors.UnsupportedError(
            f"Expected either an index or a name, found index={index!r}, name={name!r}."
        )
    if not isinstance(type_spec, fl.StructType):
        raise errors.ValueMismatchError(
            f"Expected a struct to select from, found a value of type `{type_spec}`."
        )
    names = [element_name for element_name, _ in type_spec.items()]
    if name is not None and name in names:
        return names.index(name)
    if isinstance(index, int | np.integer) and 0 <= index < len(names):
        return int(index)
    raise errors.ValueMismatchError(
        f"Expected an element of `{type_spec}`, found"
        f" {index if name is None else name!r}."
    )


def check_call(
    function: fl.framework.ExecutorValue, argument: fl.framework.ExecutorValue | None
) -> fl.FunctionType:
    """Return the type of a function that an executor calls with an argument.

    Raises ValueMismatchError if `function` is not a function, or does not take
    `argument`. For a function without a parameter, `argument` is None.
    """
    type_spec = function.type_signature
    if not isinstance(type_spec, fl.FunctionType):
        raise errors.ValueMismatchError(
            f"Expected a function to call, found a value of type `{type_spec}`."
        )
    if type_spec.parameter is None and argument is not None:
        raise errors.ValueMismatchError(
            f"Expected no argument for `{type_spec}`, found one of type"
            f" `{argument.type_signature}`."
        )
    if type_spec.parameter is not None and argument is None:
        raise errors.ValueMismatchError(
            f"Expected an argument of type `{type_spec.parameter}`, found none."
        )
    if argument is not None and type_spec.parameter is not None:
        check_assignable(type_spec.parameter, argument.type_signature, "an argument")
    return type_spec


def check_no_argument(type_spec: fl.FunctionType, arg: object) -> None:
    """Raise ValueMismatchError for an argument of a function that takes none."""
    if type_spec.parameter is None and arg is not None:
        raise errors.ValueMismatchError(
            f"Expected no argument for `{type_spec}`, found {show(arg)}."
        )


def check_count(value: object, name: str, least: int = 1) -> int:
    """Return a count that a user passed as the argument `name`, as an int.

    Raises CardinalityError for a number below `least`, and ValueMismatchError for any
    other value that is not a whole number.
    """
    if isinstance(value, int | float | np.number) and value < least:
        raise errors.CardinalityError(
            f"Expected `{name}` of at least {least}, found {name}={value}."
        )
    if not is_whole(value):
        raise errors.ValueMismatchError(
            f"Expected a whole number for `{name}`, found {show(value)}."
        )
    return int(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy. A bool is not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def read_whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return a setting from `least` to `most` as an int, or raise ConfigError."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        within = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise errors.ConfigError(
            f"Expected `{name}` to be a whole number {within}, found"
            f" {errors.describe(value)}."
        )
    return int(value)


def member_type(type_spec: fl.Type) -> fl.Type:
    """Return the type of one member of a federated type: int32 for {int32}@CLIENTS."""
    return cast("fl.FederatedType", type_spec).member


def is_empty_struct(type_spec: fl.Type) -> bool:
    """Return whether a type is a struct without elements."""
    return isinstance(type_spec, fl.StructType) and len(type_spec) == 0


def struct_type(type_spec: fl.Type) -> fl.StructType:
    """Return `type_spec`, cast for the type checker. It must be a struct."""
    return cast("fl.StructType", type_spec)


def function_type(type_spec: fl.Type) -> fl.FunctionType:
    """Return `type_spec`, cast for the type checker. It must be a function."""
    return cast("fl.FunctionType", type_spec)
