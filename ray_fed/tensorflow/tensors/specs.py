"""Converts types of federated_language to TensorFlow's specs, and back."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import attrs
import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.language import blocks
from ray_fed.language.structs import Struct, iter_elements, to_struct
from ray_fed.language.type_checks import is_whole

_DTYPES = frozenset(
    {"bool", "bfloat16", "complex64", "complex128"}
    | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    | {f"float{bits}" for bits in (16, 32, 64)}
)
"""Names of the dtypes that federated_language can serialize, besides strings."""

_MAX_ELEMENTS = 2**63


def to_tf_dtype(type_spec: fl.TensorType) -> tf.DType:
    """Return the dtype of a tensor type as a dtype of TensorFlow."""
    dtype = np.dtype(type_spec.dtype)
    return tf.string if dtype.type is np.str_ else tf.as_dtype(dtype)


def to_tensor_type(dtype: tf.DType, shape: tf.TensorShape) -> fl.TensorType:
    """Return the tensor type with a dtype and a shape of TensorFlow."""
    return fl.TensorType(_numpy_dtype(dtype), _dims(shape))


def _numpy_dtype(dtype: tf.DType) -> Any:
    if dtype == tf.string:
        return np.str_
    if dtype in (tf.variant, tf.resource):
        raise _dtype_error(f"tf.{dtype.name}")
    return dtype.as_numpy_dtype


def _dims(shape: tf.TensorShape) -> Any:
    rank = cast("int | None", shape.rank)
    return None if rank is None else tuple(shape)


def to_spec(type_spec: fl.TensorType) -> tf.TensorSpec:
    """Return the TensorSpec of a tensor type."""
    return tf.TensorSpec(
        tf.TensorShape(cast("Any", type_spec.shape)), to_tf_dtype(type_spec)
    )


SPLITS = tf.TensorSpec([None], tf.int64)
"""Spec of splits: the first row of each of several concatenated tensors, and then the
number of all rows."""


def column_spec(type_spec: fl.TensorType) -> tuple[tf.TensorSpec, bool] | None:
    """Return the spec of a tensor that joins many tensors of a type.

    Tensors of one shape are stacked. Tensors whose first size differs are concatenated,
    and the second result is True, because `SPLITS` must say where each one begins. The
    result is None if other sizes may differ.
    """
    shape = to_spec(type_spec).shape
    if type_spec.shape is None or None in type_spec.shape[1:]:
        return None
    has_splits = None in type_spec.shape
    rows = tf.TensorShape([None]) + (shape[1:] if has_splits else shape)
    return tf.TensorSpec(rows, to_tf_dtype(type_spec)), has_splits


def to_type(obj: object) -> fl.Type:
    """Return the federated_language type of a type specification.

    It accepts everything that `fl.to_type` accepts, and TensorFlow's specifications.

        to_type({"x": tf.TensorSpec([None, 4], tf.float32)})    <x=float32[?,4]>

    Args:
        obj: A dtype of NumPy or TensorFlow, a pair of a dtype and a shape, a
            `tf.TensorSpec`, a `tf.data.DatasetSpec`, a federated type, or a structure
            of these.

    Raises:
        TypeError: `obj` does not specify a type of dense tensors. An error for a dtype,
            a size or a name is a `ValueMismatchError`.
        CompileError: `obj` nests deeper than protobuf writes or reads.
    """
    try:
        type_spec = fl.to_type(_without_tensorflow(obj))
        _check_type(type_spec)
    except RecursionError as error:
        raise blocks.depth_error() from error
    except NotImplementedError as error:  # a dtype that federated_language cannot write
        raise _dtype_error(error) from error
    return type_spec


def _check_type(type_spec: fl.Type) -> None:
    if isinstance(type_spec, fl.TensorType):
        _check_dtype(type_spec.dtype)
        _check_sizes(type_spec.shape or ())
    if isinstance(type_spec, fl.StructType):
        for element in type_spec.items():  # of a struct: names may be absent
            _check_name(element[0])
    for part in type_spec.children():
        _check_type(part)


def _check_dtype(dtype: Any) -> None:
    actual = np.dtype(dtype)
    if actual.type is not np.str_ and actual.name not in _DTYPES:
        raise _dtype_error(actual)


def _dtype_error(dtype: object) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected a dtype of numbers, truth values or strings, found `{dtype}`:"
        f" legal are {sorted(_DTYPES)} and np.str_."
    )


def _check_sizes(shape: Iterable[Any]) -> None:
    sizes = [size for size in shape if size is not None]
    are_counts = all(is_whole(size) and size >= 0 for size in sizes)
    if (
        not are_counts
        or math.prod(max(int(size), 1) for size in sizes) >= _MAX_ELEMENTS
    ):
        raise _sizes_error(sizes)


def _sizes_error(sizes: list[Any]) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        "Expected None or whole numbers of at least 0 as sizes of a shape, and"
        f" fewer than 2**63 elements, found {errors.describe(sizes)}."
    )


def _check_name(name: str | None) -> None:
    try:
        (name or "").encode()
    except UnicodeEncodeError as error:
        raise errors.ValueMismatchError(
            f"Expected names of elements that UTF-8 can hold, found {name!r}."
        ) from error


def _without_tensorflow(obj: Any) -> Any:
    match obj:
        case tf.DType():
            return _numpy_dtype(obj)
        case tf.TensorSpec():
            return to_tensor_type(obj.dtype, obj.shape)
        case tf.data.DatasetSpec():
            return fl.SequenceType(_without_tensorflow(obj.element_spec))
        case tf.RaggedTensorSpec() | tf.SparseTensorSpec():
            raise _dense_error(obj)
        case tf.TensorShape():
            return _dims(obj)
        case _:
            return _container_without_tensorflow(obj)


def _container_without_tensorflow(obj: Any) -> Any:
    match obj:
        case fl.Type() | Struct():
            return obj
        case bool() | np.bool_():  # a type of size True equals a type of size 1
            raise _sizes_error([obj])
        case tuple() if hasattr(obj, "_fields"):
            return cast("Any", type(obj))(
                *(_without_tensorflow(field) for field in obj)
            )
        case list() | tuple():
            return type(obj)(_without_tensorflow(item) for item in obj)
        case Mapping():
            return cast("Any", type(obj))(
                (k, _without_tensorflow(v)) for k, v in obj.items()
            )
        case _ if attrs.has(type(obj)):
            fields = attrs.asdict(obj, recurse=False)
            return type(obj)(**{k: _without_tensorflow(v) for k, v in fields.items()})
        case _:
            return obj


def _dense_error(value: object) -> TypeError:
    return TypeError(
        f"Expected dense tensors, found `{type(value).__name__}`: pass its component"
        " tensors."
    )


def infer_type(value: object) -> fl.Type:
    """Return the type of a value with tensors or datasets, or raise TypeError."""
    match value:
        case tf.Tensor() | tf.Variable():
            return to_tensor_type(value.dtype, value.shape)
        case tf.data.Dataset():
            return fl.SequenceType(_without_tensorflow(value.element_spec))
        case tf.RaggedTensor() | tf.SparseTensor():
            raise _dense_error(value)
        case fl.TypedObject():
            return value.type_signature
        case _ if _is_container(value):
            return _infer_container(value)
        case _:
            return _infer_leaf(value)


def _is_container(value: object) -> bool:
    return isinstance(value, list | tuple | Mapping | Struct) or attrs.has(type(value))


def _infer_container(value: Any) -> fl.Type:
    elements = [
        (name, infer_type(member)) for name, member in iter_elements(to_struct(value))
    ]
    if isinstance(value, Struct):
        return fl.StructType(elements)
    typed = [
        (name, member) if name is not None else member for name, member in elements
    ]
    return fl.StructWithPythonType(typed, type(value))


def _infer_leaf(value: object) -> fl.Type:
    try:
        inferred = fl.framework.infer_type(value)
    except NotImplementedError:
        inferred = None
    if inferred is None:
        raise TypeError(
            "Expected tensors, numpy values, numbers, datasets or structures of them,"
            f" found `{type(value).__name__}`."
        )
    return inferred
