"""Tensors of updates and weights: the types to add them up in, and what they must be.

A sum in float16 ends at 65,504, one in bfloat16 has 8 bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import federated_language as fl
import tensorflow as tf

_SHORT = (tf.float16, tf.bfloat16)


def widened(tensor: Any) -> tf.Tensor:
    """Return floats of 16 bits as float32, and others as they are."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype in _SHORT else tensor


def narrowed(values: Any, like: Any) -> Any:
    """Return a structure in the types of another one, of tensors or of `specs_of`."""
    return _cast(values, like, lambda _: True)


def averaged(means: Any, like: Any) -> Any:
    """Return the result of `narrowed` for floats. Means of integers stay unchanged."""
    return _cast(means, like, lambda dtype: dtype.is_floating)


def _cast(values: Any, like: Any, is_cast: Callable[[tf.DType], bool]) -> Any:
    def cast(value: Any, each: Any) -> Any:
        return tf.cast(value, each.dtype) if is_cast(each.dtype) else value

    return tf.nest.map_structure(cast, values, like, check_types=False)


def specs_of(struct_type: Any) -> Any:
    """Return the specs of tensors of a type, in its containers."""
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

    If the sum of finite elements is infinite, the result is false.
    """
    # One pass and no copy: a number that is not finite makes the sum not finite.
    sums = [_sum_by_axes(widened(t)) for t in tensors if t.dtype.is_floating]
    finite = [tf.math.is_finite(total) for total in sums]
    return tf.reduce_all(tf.stack(finite)) if finite else tf.ones([], tf.bool)


def _sum_by_axes(tensor: tf.Tensor) -> tf.Tensor:
    """Sum a tensor one axis after another.

    XLA adds up rows side by side, but all elements of a tensor one by one.
    """
    for _ in range(tensor.shape.rank or 0):
        tensor = tf.reduce_sum(tensor, 0)
    return tensor


def require(condition: tf.Tensor, message: str, *tensors: Any) -> list[Any]:
    """Return tensors that exist only if a condition holds.

    Otherwise the computation fails with the message.
    """
    with tf.control_dependencies([tf.debugging.Assert(condition, [message])]):
        return [tf.identity(tensor) for tensor in tensors]
