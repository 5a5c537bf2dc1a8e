"""Tensors at the edge: numbers, arrays and strings, checked against their type."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import federated_language as fl
import numpy as np
from numpy.typing import NDArray

import ray_fed.errors as errors
from ray_fed.language.structs import Plain, is_raw_memory, show
from ray_fed.values import columnar_sequence


def to_plain_tensor(value: object, type_spec: fl.TensorType, label: str) -> Plain:
    """Check a value against the type of a tensor and return it as numpy's.

    Raises:
        ValueMismatchError: the value is not of the type.
    """
    if hasattr(value, "numpy") and hasattr(value, "dtype"):
        value = _numpy_of(value, label)
    if isinstance(value, np.ma.MaskedArray):  # its hidden elements would come to light
        raise errors.ValueMismatchError(
            f"Expected {label} to be of type `{type_spec}`, found an array with a mask:"
            " pass `filled(...)` of it."
        )
    dtype: type[np.generic] = np.dtype(type_spec.dtype).type
    if isinstance(value, fl.program.MaterializableValueReference):
        raise _tensor_error(value, type_spec, label)  # numpy would wait for its value
    if dtype is np.str_:
        array = _string_array(value, type_spec, label)
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.type is not dtype:
            raise _tensor_error(value, type_spec, label)
        array = np.asarray(value)
    else:
        array = _array_of_numbers(value, type_spec, label)
    if not fits_shape(array.shape, type_spec.shape):
        raise errors.ValueMismatchError(
            f"Expected {label} to be of type `{type_spec}`, found an array of shape"
            f" {array.shape}: reshape it, or declare another type, such as by the"
            " input of a model."
        )
    return array[()] if array.ndim == 0 else array


def gather_arrays(values: Sequence[Any], type_spec: fl.Type) -> list[Plain] | None:
    """Return values of one type as plain ones if they hold nothing but numpy's arrays.

    A tenth of the time of a check of each value by itself.

    Args:
        values: tuples or lists, nested as the type's structs; unchecked.
        type_spec: of each.

    Returns:
        None where a value is another one, or may be a wrong one.
    """
    if isinstance(type_spec, fl.TensorType):
        return list(values) if _are_arrays(values, type_spec) else None
    if not isinstance(type_spec, fl.StructType) or not len(type_spec):
        return None
    are_listed = set(map(type, values)) <= {tuple, list}
    if not are_listed or set(map(len, values)) != {len(type_spec)}:
        return None
    columns = [
        gather_arrays(column, element)
        for column, (_, element) in zip(
            zip(*values, strict=True), type_spec.items(), strict=True
        )
    ]
    found = [column for column in columns if column is not None]
    return list(zip(*found, strict=True)) if len(found) == len(columns) else None


def _are_arrays(values: Sequence[Any], type_spec: fl.TensorType) -> bool:
    if set(map(type, values)) != {np.ndarray}:
        return False
    dtype = np.dtype(type_spec.dtype)
    if dtype.kind == "U":
        return False
    found = {value.dtype for value in values}
    if any(one != dtype or one.type is not dtype.type for one in found):
        return False
    shapes = {value.shape for value in values}
    return all(shape and fits_shape(shape, type_spec.shape) for shape in shapes)


def _numpy_of(value: Any, label: str) -> Any:
    try:
        return value.numpy()
    except (AttributeError, NotImplementedError) as error:
        raise _symbolic_error(value, label) from error


def _symbolic_error(value: object, label: str) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected {label} to be a value, found the symbolic tensor `{value}`: call the"
        " computation outside of TensorFlow graphs."
    )


def fits_shape(found: tuple[int, ...], declared: columnar_sequence.Dims) -> bool:
    """Return whether a shape is one that a type declares."""
    if declared is None:
        return True
    return len(found) == len(declared) and all(
        size is None or size == actual
        for actual, size in zip(found, declared, strict=True)
    )


def _tensor_error(
    value: object, type_spec: fl.TensorType, label: str
) -> errors.ValueMismatchError:
    found = (
        f"an array of dtype {value.dtype}"
        if isinstance(value, np.ndarray | np.generic)
        else show(value)
    )
    return errors.ValueMismatchError(
        f"Expected {label} to be of type `{type_spec}`, found {found}: nothing is"
        f" cast, so convert it first."
    )


def _string_array(value: object, type_spec: fl.TensorType, label: str) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, RecursionError) as error:  # ragged, or lists too deep
        raise _tensor_error(value, type_spec, label) from error
    if array.dtype.kind not in "USO":
        raise _tensor_error(value, type_spec, label)
    # numpy drops trailing NULs of its own byte strings, so strings stay objects.
    strings = np.empty(array.shape, object)
    items = np.asarray(value, object) if array.dtype.kind != "O" else array
    for index in np.ndindex(array.shape):
        item = items[index]
        if not isinstance(item, str | bytes):
            raise _tensor_error(value, type_spec, label)
        try:
            strings[index] = item.encode() if isinstance(item, str) else bytes(item)
        except UnicodeEncodeError as error:  # a lone surrogate
            raise _tensor_error(value, type_spec, label) from error
    return strings


_NUMBER_KINDS: Mapping[str, str] = {
    "b": "b",
    "i": "iufcV",
    "u": "iufcV",
    "f": "fcV",
    "c": "c",
}
"""Kinds of dtype (V is bfloat16) that Python numbers of a kind may take."""


_PYTHON_NUMBERS = {bool, int, float, complex}


def _holds_numbers(value: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether nested lists hold Python's own numbers, or arrays of a dtype.

    What has a dtype of its own is not cast; what is memory has no numbers at all.
    """
    if isinstance(value, list | tuple):
        members = cast("Sequence[Any]", value)
        if set(map(type, members)) <= _PYTHON_NUMBERS:
            return True
        return all(_holds_numbers(member, dtype) for member in members)
    if hasattr(value, "dtype") or hasattr(value, "__array__"):
        return np.asarray(value).dtype == dtype
    return not is_raw_memory(value)


_EXACT = 2**53
"""Whole numbers up to this one are compared as float64 without loss."""


def _are_equal(array: NDArray[Any], numbers: NDArray[Any]) -> bool:
    """Return whether numbers are the same after a cast, to the last digit."""
    if not (array == numbers).all():
        return False
    if numbers.dtype.kind not in "iu" or array.dtype.kind in "iu":
        return True
    if (np.maximum(numbers, 0) <= _EXACT).all() and (numbers >= -_EXACT).all():
        return True
    cast_back = [int(number) for number in np.real(array).ravel().tolist()]
    return cast_back == numbers.ravel().tolist()


def _array_of_numbers(value: object, type_spec: fl.TensorType, label: str) -> Any:
    dtype = np.dtype(type_spec.dtype)
    try:
        if not _holds_numbers(value, dtype):
            raise _tensor_error(value, type_spec, label)
        found = np.asarray(value)
    except (ValueError, RecursionError) as error:  # ragged, or lists too deep
        raise _tensor_error(value, type_spec, label) from error
    except NotImplementedError as error:
        raise _symbolic_error(value, label) from error
    if found.size == 0:
        return found.astype(dtype)
    if dtype.kind not in _NUMBER_KINDS.get(found.dtype.kind, ""):
        raise _tensor_error(value, type_spec, label)
    with np.errstate(over="ignore"):
        array = found.astype(dtype)
    exact = found.dtype.kind == "f" or _are_equal(array, found)
    if not exact or not (np.isfinite(array) | ~np.isfinite(found)).all():
        raise _tensor_error(value, type_spec, label)
    return array
