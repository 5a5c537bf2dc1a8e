"""Helpers for the tensors of updates and weights: dtypes for sums, types and checks.

Sums need wider dtypes: float16 ends at 65,504, and bfloat16 has 8 bits of precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
import tensorflow as tf

_SHORT = (tf.float16, tf.bfloat16)


def widened(tensor: Any) -> tf.Tensor:
    """Return a tensor of 16-bit floats as float32, and other tensors unchanged."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype in _SHORT else tensor


def narrowed(values: Any, like: Any) -> Any:
    """Cast a structure of tensors to the dtypes of `like`, of tensors or specs."""
    return _cast(values, like, lambda _: True)


def averaged(means: Any, like: Any) -> Any:
    """Cast means to the floating dtypes of `like`. Means of integers stay unchanged."""
    return _cast(means, like, lambda dtype: dtype.is_floating)


def _cast(values: Any, like: Any, is_cast: Callable[[tf.DType], bool]) -> Any:
    def cast(value: Any, each: Any) -> Any:
        return tf.cast(value, each.dtype) if is_cast(each.dtype) else value

    return tf.nest.map_structure(cast, values, like, check_types=False)


def specs_of(struct_type: Any) -> Any:
    """Return the `tf.TensorSpec`s of a type, in the type's Python containers."""
    if isinstance(struct_type, fl.TensorType):
        return tf.TensorSpec(list(struct_type.shape or ()), struct_type.dtype)
    elements = [(name, specs_of(member)) for name, member in struct_type.items()]
    container: Any = getattr(struct_type, "python_container", None)
    if container is not None and hasattr(container, "_fields"):
        return container(*(spec for _, spec in elements))
    if any(name is not None for name, _ in elements):
        return dict(elements)
    return tuple(spec for _, spec in elements)


def is_finite(tensors: Sequence[Any]) -> tf.Tensor:
    """Return whether all elements of all floats are finite, as a bool[].

    The result is also false if the elements of a tensor are finite and their sum is
    not.
    """
    # Sums need one pass and no copy. An element that is not finite makes its sum so.
    sums = [_sum_by_axes(widened(t)) for t in tensors if t.dtype.is_floating]
    finite = [tf.math.is_finite(total) for total in sums]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.ones([], tf.bool)


def _sum_by_axes(tensor: tf.Tensor) -> tf.Tensor:
    """Sum a tensor one axis after another, which XLA does faster than all at once."""
    for _ in range(tensor.shape.rank or 0):
        tensor = tf.reduce_sum(tensor, 0)
    return tensor


def require(condition: tf.Tensor, message: str, *tensors: Any) -> list[Any]:
    """Return the tensors, and let the graph fail with `message` unless `condition`."""
    with tf.control_dependencies([tf.debugging.Assert(condition, [message])]):
        return [tf.identity(tensor) for tensor in tensors]
