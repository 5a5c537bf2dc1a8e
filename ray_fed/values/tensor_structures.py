"""Structures of tensors: their types and values, as lists of tensors in order."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import federated_language as fl
import numpy as np

import ray_fed.errors as errors
from ray_fed.language.structs import Plain, Struct


def storage_dtype(type_spec: fl.TensorType) -> np.dtype[Any]:
    """Return the dtype of plain arrays of the type: object for strings."""
    dtype = np.dtype(type_spec.dtype)
    return np.dtype(object) if dtype.type is np.str_ else dtype


def flatten_type(type_spec: fl.Type) -> list[fl.TensorType]:
    """Return the tensors of a structure of tensors, in order.

    Raises:
        ValueMismatchError: the type holds something else.
    """
    match type_spec:
        case fl.TensorType():
            return [type_spec]
        case fl.StructType():
            return [
                tensor
                for _, element in type_spec.items()
                for tensor in flatten_type(element)
            ]
        case _:
            raise errors.ValueMismatchError(
                f"Expected a structure of tensors, found `{type_spec}`."
            )


def batch_type(row: fl.Type) -> fl.Type:
    """Return the type of rows stacked, each tensor with a first dimension more.

    Raises:
        ValueMismatchError: the type holds something else than tensors.
    """
    match row:
        case fl.TensorType():
            shape = row.shape
            return fl.TensorType(row.dtype, None if shape is None else [None, *shape])
        case fl.StructWithPythonType():
            members = [(name, batch_type(inside)) for name, inside in row.items()]
            return fl.StructWithPythonType(members, row.python_container)
        case fl.StructType():
            return fl.StructType(
                [(name, batch_type(inside)) for name, inside in row.items()]
            )
        case _:
            raise errors.ValueMismatchError(
                f"Expected rows of tensors to batch, found `{row}`."
            )


def flatten(plain: Plain) -> list[Plain]:
    """Return the tensors of a plain structure of tensors, in the order of its type."""
    if type(plain) is not tuple:
        return [plain]
    elements = cast("tuple[Any, ...]", plain)
    return [tensor for element in elements for tensor in flatten(element)]


def unflatten(tensors: Iterator[Any], type_spec: fl.Type) -> Struct[Any] | Any:
    """Return tensors in the order of their type as nested structs: undoes `flatten`."""
    if not isinstance(type_spec, fl.StructType):
        return next(tensors)
    return Struct(
        (name, unflatten(tensors, element)) for name, element in type_spec.items()
    )


def nester(type_spec: fl.Type) -> Callable[[Iterator[Any]], Plain]:
    """Return a function from tensors, in the order of a type, to its plain value."""
    if not isinstance(type_spec, fl.StructType):
        return next
    inside = [nester(element) for _, element in type_spec.items()]
    return lambda tensors: tuple([nest(tensors) for nest in inside])
