"""Serialised `tf.train.Example`s of one client as columns: all of them in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Column, ColumnarSequence

_KINDS = (np.dtype(np.int64), np.dtype(np.float32), np.dtype(object))


def to_features(features: Mapping[str, Any]) -> dict[str, fl.TensorType]:
    """Return the types of features, from whatever converts to them.

    Raises:
        ValueMismatchError: an example cannot hold one: it knows int64, float32 and
            strings, in a shape whose first size alone may be unknown.
    """
    found: dict[str, fl.TensorType] = {}
    for name, given in features.items():
        tensor = specs.to_type(given)
        fits = (
            isinstance(tensor, fl.TensorType)
            and tensor_structures.storage_dtype(tensor) in _KINDS
            and tensor.shape is not None
            and None not in tensor.shape[1:]
        )
        if not fits:
            raise errors.ValueMismatchError(
                "Expected int64, float32 or strings, in a shape whose first size alone"
                f" may be unknown, as the feature `{name}`, found `{tensor}`: convert"
                " it by `map`."
            )
        found[name] = tensor  # pyright: ignore[reportArgumentType]
    return found


def parse(
    serialised: Sequence[bytes], features: Mapping[str, fl.TensorType], label: str
) -> ColumnarSequence:
    """Return examples as a sequence, an element each, features in the order given.

    Args:
        serialised: of `tf.train.Example`.
        features: as `to_features` returned them.
        label: what these are called in an error.

    Raises:
        ValueMismatchError: an example has no such feature, of that kind and size.
    """
    wanted = {name: _feature(name, tensor) for name, tensor in features.items()}
    try:
        with tf.device("/device:CPU:0"):
            parsed: Any = tf.io.parse_example(
                tf.constant(list(serialised), tf.string, [len(serialised)]), wanted
            )
            columns = [_column(parsed[name], features[name]) for name in features]
    except (tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
        raise _mismatch(features, label, str(error.message)) from error
    except UnicodeDecodeError as error:  # TensorFlow's message quotes the bytes
        raise _mismatch(features, label, "bytes that are no example") from error
    return ColumnarSequence(tuple(columns), len(serialised))


def _mismatch(
    features: Mapping[str, fl.TensorType], label: str, found: str
) -> errors.ValueMismatchError:
    return errors.ValueMismatchError(
        f"Expected examples with the features {list(features)} in {label}, found"
        f" otherwise ({found})."
    )


def _feature(name: str, tensor: fl.TensorType) -> Any:
    dtype = specs.to_tf_dtype(tensor)
    shape = list(tensor.shape or ())
    if None not in shape:
        return tf.io.FixedLenFeature(shape, dtype)
    inside = tuple(
        tf.io.RaggedFeature.UniformRowLength(size or 0) for size in shape[1:]
    )
    return tf.io.RaggedFeature(
        dtype, value_key=name, partitions=inside, row_splits_dtype=tf.int64
    )


def _column(parsed: Any, tensor: fl.TensorType) -> Column:
    if not isinstance(parsed, tf.RaggedTensor):
        return Column(parsed.numpy())
    values: Any = parsed.values
    splits = parsed.row_splits.numpy()
    shape = [size or 0 for size in (tensor.shape or ())[1:]]
    while isinstance(values, tf.RaggedTensor):
        values = values.values
    return Column(values.numpy().reshape(-1, *shape), splits)
