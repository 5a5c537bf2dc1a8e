"""Metrics as a history keeps them: the same types before a run is saved and after."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

import ray_fed.errors as errors

NUMBERS = "biufV"
"""Kinds of numpy's dtypes that are numbers; bfloat16 is of kind `V`."""

MOST_ELEMENTS = 100
"""Elements of an array that have names of their own; a larger one has none."""


def read_evaluation(found: Any) -> dict[str, Any]:
    """Return what `evaluate` returned, as `read_metrics` does.

    Raises:
        ValueMismatchError: it has no names, or a value is of a kind that is not kept.
    """
    if not isinstance(found, Mapping) and not hasattr(found, "_asdict"):
        raise errors.ValueMismatchError(
            "Expected metrics by name from `evaluate`, found"
            f" {errors.describe(found)} of type `{type(found).__name__}`: return a"
            ' mapping, such as {"loss": 0.5}.'
        )
    return read_metrics(found, "evaluation")


def read_metrics(found: Any, label: str) -> Any:
    """Return metrics as plain values.

    Mappings and named tuples become dicts. Tensors, and references to values, become
    arrays of numpy, or its numbers where they have no dimension.

    Args:
        found: numbers, text, bytes, arrays, tensors, or mappings, lists and tuples of
            these.
        label: what it is, for the error.

    Raises:
        ValueMismatchError: a value is of another kind.
    """
    if found is None or type(found) in (bool, int, float, str, bytes):
        return found
    if hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, Mapping):
        pairs = cast("Mapping[Any, Any]", found).items()
        return {str(k): read_metrics(v, f"{label}.{k}") for k, v in pairs}
    if isinstance(found, list | tuple):
        kind = list if isinstance(found, list) else tuple
        members = cast("list[Any] | tuple[Any, ...]", found)
        return kind(read_metrics(member, label) for member in members)
    if not hasattr(found, "__array__"):
        raise errors.ValueMismatchError(
            "Expected numbers, text, bytes, arrays, tensors, or mappings, lists and"
            f" tuples of these as metrics, found a `{type(found).__name__}` as"
            f" `{label}`: convert it to one of these."
        )
    return _read_array(found, label)


def _read_array(found: Any, label: str) -> Any:
    if isinstance(found, np.generic | np.ndarray):
        array: Any = found
    else:
        try:
            array = np.asarray(found)
        except Exception as error:
            raise errors.ValueMismatchError(
                f"Expected a tensor that numpy can read as `{label}`, found a"
                f" `{type(found).__name__}` ({error}): convert it to an array or a"
                " number."
            ) from error
        array = array if array.ndim else array[()]
    if is_number_type(array.dtype):
        return array
    return read_metrics(array.tolist(), label)


def is_number_type(dtype: np.dtype[Any]) -> bool:
    """Return whether the elements of arrays of a dtype are numbers."""
    return dtype.kind in NUMBERS and not dtype.names


def flatten_numbers(metrics: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield numbers with their names: `loss`, and `f1/0`, `f1/1` of several in one.

    Args:
        metrics: as `read_metrics` returns them; or other values, which are left out.
        path: name of `metrics`.
    """
    if hasattr(metrics, "_asdict"):
        metrics = metrics._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(metrics, list | tuple):
        metrics = dict(enumerate(cast("Sequence[Any]", metrics)))
    if isinstance(metrics, Mapping):
        for name, value in cast("Mapping[Any, Any]", metrics).items():
            yield from flatten_numbers(value, f"{path}/{name}" if path else str(name))
    elif isinstance(metrics, bool | int | float | np.generic | np.ndarray):
        array = np.asarray(metrics)
        if is_number_type(array.dtype):
            names = name_elements(path, array.shape)
            yield from zip(names, map(float, array.flat), strict=False)


def name_elements(path: str, shape: Sequence[int]) -> list[str]:
    """Return the names of an array's elements: its own, if it has one; none of many."""
    size = math.prod(shape)
    if size == 1:
        return [path]
    if size > MOST_ELEMENTS:
        return []
    return ["/".join([path, *map(str, index)]) for index in np.ndindex(*shape)]


def is_same(one: Any, other: Any) -> bool:
    """Return whether plain values are equal; one that is not a number equals another.

    Args:
        one: as `read_metrics` returns it.
        other: likewise.
    """
    match one, other:
        case dict(), dict():
            mine, its = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
            return mine.keys() == its.keys() and all(
                is_same(value, its[name]) for name, value in mine.items()
            )
        case (list(), list()) | (tuple(), tuple()):
            members, found = cast("list[Any]", one), cast("list[Any]", other)
            return len(members) == len(found) and all(map(is_same, members, found))
        case (float() | np.generic() | np.ndarray(), _):
            equal = (one == other) | ((one != one) & (other != other))  # noqa: PLR0124
            return np.shape(one) == np.shape(other) and bool(np.all(equal))
        case _:
            return one == other
