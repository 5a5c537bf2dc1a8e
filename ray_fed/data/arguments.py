"""Checks and conversions of the arguments that users pass to `ClientData`."""

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
from ray_fed.values.client_references import plain_id


def read_member_type(given: object) -> fl.Type:
    """Convert a user's `type_spec` to a type, or raise ValueMismatchError."""
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
        "Expected the type of one client's value, made of tensors, structs and"
        f" sequences, as `type_spec`, found {errors.describe(given)}: pass a type such"
        " as fl.SequenceType(np.float32)."
    )


def read_ids(given: object) -> list[Any]:
    """Return a list of the ids, in order, with NumPy scalars as Python objects."""
    if not isinstance(given, Iterable):
        raise errors.ConfigError(
            f"Expected `ids`, one for each client, found {errors.describe(given)}: pass"
            " a list of them."
        )
    return list(map(plain_id, cast("Iterable[Any]", given)))


def check_callable(given: object, name: str) -> None:
    """Raise ConfigError unless the argument called `name` is a function."""
    if not callable(given):
        raise errors.ConfigError(
            f"Expected a function as `{name}`, found {errors.describe(given)}."
        )


def check_ids(ids: Sequence[Any]) -> None:
    """Raise ConfigError if an id cannot be hashed, is missing, or occurs twice."""
    missing = [client for client in ids if _is_missing(client)]
    if missing:
        raise errors.ConfigError(
            f"Expected an id for each client, found {errors.describe(missing[0])}, a"
            " missing value: leave it out, such as by `dropna`."
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
            "Expected a different id for each client, found"
            f" {structs.show(twice)} {count} times."
        )


def expect_ids(given: Iterable[Any], ids: Iterable[Hashable]) -> None:
    """Raise ConfigError if `given` has booleans or floats, but the known `ids` do not.

    `True` equals 1 in Python. So a mask would select the clients with the ids 1 and 0.
    """
    for kind in (bool | np.bool_, float | np.floating):
        wrong = [client for client in given if isinstance(client, kind)]
        if wrong and not any(isinstance(client, kind) for client in ids):
            raise errors.ConfigError(
                f"Expected ids of clients, found {errors.describe(wrong[0])}: instead"
                " of a mask, pass the ids where it is true, such as"
                " `[id for id, chosen in zip(data.ids, mask) if chosen]`."
            )


def read_weights(weights: object, ids: Sequence[Hashable]) -> NDArray[np.float64]:
    """Return the weights as f64[clients].

    Raises ConfigError unless there is one finite weight >= 0 for each id.
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
    """Return whether an id is None, or NaN, NaT or NA of NumPy or pandas."""
    if isinstance(client, float | np.floating | np.datetime64 | np.timedelta64):
        return client != client  # noqa: PLR0124 (only NaN and NaT differ from themselves)
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
