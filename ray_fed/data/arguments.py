"""Arguments of `ClientData` that a user may get wrong, checked when it is made."""

import collections
import math
import numbers
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.language import structs


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


def check_ids(ids: Sequence[Any]) -> None:
    """Raise unless each client has an id of its own.

    Raises:
        ConfigError: one cannot be hashed, is missing, or is there twice.
    """
    missing = [client for client in ids if _is_missing(client)]
    if missing:
        raise errors.ConfigError(
            f"Expected an id of each client, found {errors.describe(missing[0])}, which"
            " says that there is none: leave it out, such as by `dropna`."
        )
    unhashable = [client for client in ids if not _is_hashable(client)]
    if unhashable:
        raise errors.ConfigError(
            "Expected ids that can be hashed, such as numbers, text or tuples of"
            f" these, found {structs.show(unhashable[0])}."
        )
    if len(set(ids)) < len(ids):
        ((twice, count),) = collections.Counter(ids).most_common(1)
        raise errors.ConfigError(
            "Expected an id of its own for each client, found"
            f" {structs.show(twice)} {count} times."
        )


def read_weights(weights: object, ids: Sequence[Hashable]) -> NDArray[np.float64]:
    """Return one number for each client; text and truth values are none.

    Raises:
        ConfigError: there are more or fewer, or one is not finite and >= 0.
    """
    found = np.asarray(weights, object)
    if found.shape != (len(ids),):
        raise errors.ConfigError(
            f"Expected one weight for each of {len(ids)} clients, found {found.size}."
        )
    for client, weight in zip(ids, found, strict=True):
        if not _is_weight(weight):
            raise errors.ConfigError(
                "Expected finite numbers as weights, of at least 0, found"
                f" {structs.show(weight)} for the client with the id {client!r}."
            )
    return found.astype(np.float64)


def _is_missing(client: Any) -> bool:
    """Return whether an id is None, or NaN, NaT or NA of numpy or pandas."""
    if isinstance(client, float | np.floating | np.datetime64 | np.timedelta64):
        return client != client  # noqa: PLR0124 (so are they told)
    return client is None or type(client).__name__ in ("NAType", "NaTType")


def _is_hashable(client: object) -> bool:
    try:
        hash(client)  # a tuple may hold what cannot be hashed
    except TypeError:
        return False
    return True


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        found = float(value)
    except OverflowError:
        return False
    return math.isfinite(found) and found >= 0
