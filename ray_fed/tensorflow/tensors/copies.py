"""Arrays as tensors, copied once: `tf.constant` copies large ones three times.

Where there is no GPU a tensor has the memory that an array was copied to. With one, and
for what numpy holds otherwise than TensorFlow (strings, bfloat16), TensorFlow copies.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

_ALIGNMENT = 64
"""Bytes. TensorFlow's operations count on it, and nobody checks shared memory."""

_SHARED_KINDS = "biufc"
"""Kinds of numpy's dtypes that numpy and TensorFlow share."""


def as_tensor(array: Any, dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of what an array of its dtype, or a scalar, holds now."""
    if not _is_shared(dtype):
        return tf.constant(array, dtype)
    owned = _empty(np.shape(array), dtype)
    np.copyto(owned, array)
    return _share(owned)


def concatenate(arrays: Sequence[NDArray[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor with arrays of its dtype end to end; at least one."""
    if not _is_shared(dtype):
        return tf.constant(np.concatenate(arrays), dtype)
    length = sum(len(array) for array in arrays)
    owned = _empty((length, *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=owned)
    return _share(owned)


def stack(arrays: Sequence[NDArray[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of arrays of its dtype and of one shape; at least one.

    Raises:
        ValueError: their shapes differ.
    """
    if not _is_shared(dtype):
        return tf.constant(np.stack(arrays), dtype)
    owned = _empty((len(arrays), *np.shape(arrays[0])), dtype)
    np.stack(arrays, out=owned)
    return _share(owned)


def count_bytes(tensor: tf.Tensor) -> int:
    """Return about how many bytes a tensor holds."""
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64)))
    return int(tf.size(tensor)) * tensor.dtype.size


def _empty(shape: tuple[int, ...], dtype: tf.DType) -> NDArray[Any]:
    kind = np.dtype(dtype.as_numpy_dtype)
    size = math.prod(shape) * kind.itemsize
    held = np.empty(size + _ALIGNMENT, np.uint8)
    start = -held.__array_interface__["data"][0] % _ALIGNMENT
    return held[start : start + size].view(kind).reshape(shape)


def _share(owned: NDArray[Any]) -> tf.Tensor:
    return tf.experimental.dlpack.from_dlpack(owned.__dlpack__())


@functools.cache
def _is_shared(dtype: tf.DType) -> bool:
    is_known = np.dtype(dtype.as_numpy_dtype).kind in _SHARED_KINDS
    return is_known and not tf.config.list_logical_devices("GPU")
