"""What the documents say of a value and a type, in plain Python and numpy."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf


class NotOfTypeError(Exception):
    """The oracle: a value is not of a type."""


class UnsureError(Exception):
    """The oracle: the documents do not say."""


def expect(value: Any, type_spec: fl.Type) -> Any:
    """Return a value as the documents say that it comes back, in numpy's types.

    Raises:
        NotOfTypeError: it must be refused.
        UnsureError: it may be, or not.
    """
    match type_spec:
        case fl.TensorType():
            return _expect_tensor(value, type_spec)
        case fl.StructType():
            return _expect_struct(value, type_spec)
        case fl.SequenceType():
            return _expect_list(value, type_spec.element, is_sequence=True)
        case fl.FederatedType() if not type_spec.all_equal:
            return _expect_list(value, type_spec.member, is_sequence=False)
        case fl.FederatedType():
            return expect(value, type_spec.member)
        case _:
            raise AssertionError(type_spec)


def _expect_list(value: Any, element: fl.Type, *, is_sequence: bool) -> list[Any]:
    if isinstance(value, list | tuple):
        return [expect(item, element) for item in value]
    if is_sequence and not isinstance(
        value, str | bytes | Mapping | int | float | None
    ):
        raise UnsureError  # other iterables are read, where their elements fit
    raise NotOfTypeError


def _expect_struct(value: Any, type_spec: fl.StructType) -> Any:
    names = [name for name, _ in type_spec.items()]
    types = [element for _, element in type_spec.items()]
    if isinstance(value, dict):
        if set(value) != set(names):
            raise NotOfTypeError
        value = [value[name] for name in names]
    if not isinstance(value, list | tuple):
        raise NotOfTypeError if _is_scalar(value) else UnsureError
    if len(value) != len(types):
        raise NotOfTypeError
    found = [expect(item, each) for item, each in zip(value, types, strict=True)]
    if names[0] is None:
        return found
    return collections.OrderedDict(zip(names, found, strict=True))


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | int | float | complex)


def _expect_tensor(value: Any, type_spec: fl.TensorType) -> Any:
    dtype, shape = np.dtype(type_spec.dtype), tuple(type_spec.shape or ())
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        return _expect_array(value, dtype, shape)
    if not _is_scalar(value) and type(value) is not list:
        is_other = isinstance(value, bytearray | dict | set)
        raise NotOfTypeError if is_other else UnsureError
    items, found = _measure(value)
    if not _fits(found, shape):
        raise NotOfTypeError
    if dtype.kind == "U":
        if found or not isinstance(value, str | bytes):
            raise NotOfTypeError
        return encode(value)
    if not items:
        raise UnsureError
    cells = [_expect_number(item, dtype) for item in items]
    return np.array(cells, dtype).reshape(found)[()]


def _expect_array(value: Any, dtype: np.dtype[Any], shape: Any) -> Any:
    if isinstance(value, tf.Tensor) or dtype.kind == "U":
        raise UnsureError
    is_masked = isinstance(value, np.ma.MaskedArray)
    if is_masked or value.dtype != dtype or not _fits(value.shape, shape):
        raise NotOfTypeError
    return value[()] if value.ndim == 0 else value


def encode(value: str | bytes) -> bytes:
    try:
        return value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise NotOfTypeError from error


def _measure(value: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the numbers in nested lists, and their shape."""
    if not isinstance(value, list):
        return [value], ()
    if len(value) == 1 and isinstance(value[0], list) and len(value[0]) == 1:
        raise NotOfTypeError  # deeper than any type here
    inside = [_measure(item) for item in value]
    shapes = {shape for _, shape in inside}
    if len(shapes) > 1:
        raise NotOfTypeError
    items = [item for found, _ in inside for item in found]
    return items, (len(value), *(shapes.pop() if shapes else ()))


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(
        size in (None, actual) for actual, size in zip(found, shape, strict=True)
    )


def _expect_number(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        is_of_type = type(value) is bool
    elif dtype.kind in "iu":
        info = np.iinfo(dtype)
        is_of_type = type(value) is int and info.min <= value <= info.max
    elif type(value) is int:
        if abs(value) >= 2**64:
            raise UnsureError
        is_of_type = int(dtype.type(float(value))) == value
    else:
        overflows = type(value) is float and math.isfinite(value)
        with np.errstate(over="ignore"):
            overflows = overflows and not np.isfinite(dtype.type(value))
        is_of_type = type(value) is float and not overflows
    if not is_of_type:
        raise NotOfTypeError
    return value
