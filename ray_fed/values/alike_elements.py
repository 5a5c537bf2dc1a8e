"""Elements of a sequence that are all alike, laid as columns without a look at each.

What lists and generators yield is nearly always alike: numbers of one Python type,
arrays of one dtype, dicts of those with the same names. Such elements are checked and
laid by column; all others, and all that are wrong, are left to the checks of one
element, which cost about 13 us a tensor and name in their error what is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.values import columnar_sequence
from ray_fed.values.plain_tensors import fits_shape, to_plain_tensor
from ray_fed.values.tensor_structures import flatten_type, storage_dtype

_KINDS: Mapping[type, str] = {bool: "b", int: "iu", float: "f", complex: "c"}
"""Kinds of dtype that numpy gives a list of Python numbers, each exact."""


def lay_alike(
    elements: Sequence[Any], element: fl.Type
) -> list[columnar_sequence.Column] | None:
    """Return elements of a sequence as columns; None: check and lay one by one.

    Args:
        elements: what a caller gave, unchecked.
        element: the declared type of each.
    """
    values = _leaves(elements, element) if elements else None
    if values is None:
        return None
    columns = [
        _lay_tensors(leaf, type_spec)
        for leaf, type_spec in zip(values, flatten_type(element), strict=True)
    ]
    laid = [column for column in columns if column is not None]
    return laid if len(laid) == len(columns) else None


def _leaves(elements: Sequence[Any], element: fl.Type) -> list[Sequence[Any]] | None:
    """Return for each tensor of the type its values, one an element; None: unlike."""
    if isinstance(element, fl.TensorType):
        return [elements]
    if not isinstance(element, fl.StructType) or set(map(type, elements)) != {dict}:
        return None
    members = list(element.items())
    names = {name for name, _ in members}
    if not all(member.keys() == names for member in elements):
        return None
    inside = [
        _leaves([member[name] for member in elements], member_type)
        for name, member_type in members
    ]
    if any(leaves is None for leaves in inside):
        return None
    return [values for leaves in inside for values in leaves or ()]


def _lay_tensors(
    values: Sequence[Any], type_spec: fl.TensorType
) -> columnar_sequence.Column | None:
    dtype = storage_dtype(type_spec)
    kinds = set(map(type, values))
    if dtype.hasobject or len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind is np.ndarray:
        if not all(_is_of(value, dtype, type_spec) for value in values):
            return None
        return columnar_sequence.lay_column(values, dtype, type_spec.shape)
    return _lay_numbers(values, type_spec) if type_spec.shape == () else None


def _is_of(
    value: np.ndarray[Any, Any], dtype: np.dtype[Any], type_spec: fl.TensorType
) -> bool:
    return value.dtype == dtype and fits_shape(value.shape, type_spec.shape)


def _lay_numbers(
    values: Sequence[Any], type_spec: fl.TensorType
) -> columnar_sequence.Column | None:
    """Return numbers of one Python type as a column."""
    kind = type(values[0])
    if kind not in _KINDS and not issubclass(kind, np.generic):
        return None
    found = np.asarray(values)
    if kind in _KINDS and found.dtype.kind not in _KINDS[kind]:
        return None  # whole numbers that fit no one dtype
    all_of_them = fl.TensorType(type_spec.dtype, [len(values)])
    given: object = values if kind in _KINDS else found
    try:
        array = to_plain_tensor(given, all_of_them, "elements")
    except errors.ValueMismatchError:
        return None  # the check of one element says which
    return columnar_sequence.Column(array)
