"""Arguments of `ClientData` that a user may get wrong, checked when it is made."""

from collections.abc import Iterable
from typing import Any, cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors


def read_member_type(given: object) -> fl.Type:
    """Return the type of what each client has, from what converts to it.

    Raises:
        ValueMismatchError: nothing says a type, or a client cannot have a value of it.
    """
    try:
        member = fl.to_type(cast("Any", given))
    except TypeError as error:
        raise _no_member_type(given) from error
    if fl.framework.type_contains(member, _is_no_value):
        raise _no_member_type(given)
    return member


def _is_no_value(type_spec: fl.Type) -> bool:
    return not isinstance(type_spec, fl.TensorType | fl.StructType | fl.SequenceType)


def _no_member_type(given: object) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        "Expected the type of what each client has, of tensors, structs and sequences,"
        f" as `type_spec`, found {errors.describe(given)}: pass the type of one client,"
        " such as fl.SequenceType(np.float32)."
    )


def read_ids(given: object) -> list[Any]:
    """Return ids of clients, in order.

    Raises:
        ConfigError: nothing lists them.
    """
    if not isinstance(given, Iterable):
        raise errors.ConfigError(
            f"Expected `ids`, one for each client, found {errors.describe(given)}: pass"
            " a list of them."
        )
    return list(cast("Iterable[Any]", given))


def check_callable(given: object, name: str) -> None:
    """Raise unless an argument is a function.

    Raises:
        ConfigError: it is none.
    """
    if not callable(given):
        raise errors.ConfigError(
            f"Expected a function as `{name}`, found {errors.describe(given)}."
        )


def check_number(given: Any, name: str, least: int = 0) -> None:
    """Raise unless an argument is a whole number of at least another.

    Raises:
        ConfigError: it is none.
    """
    is_whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not is_whole or given < least:
        raise errors.ConfigError(
            f"Expected `{name}` to be a whole number of at least {least}, found"
            f" {given!r}."
        )


def check_place(given: object) -> None:
    """Raise unless an index is that of one client.

    Raises:
        ValueMismatchError: it is none.
    """
    if not isinstance(given, int | np.integer):
        raise errors.ValueMismatchError(
            f"Expected the place of a client, or a slice, found"
            f" {errors.describe(given)}: `select` takes ids."
        )
