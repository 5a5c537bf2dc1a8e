"""TFRecord files of `tf.train.Example`: features by the names of declared elements.

An example knows int64, float32 and strings, each as a list of values without a shape:
they are laid in the declared shape, in row-major order. Local files are read by
TensorFlow, with their checksums; others through fsspec, as a stream.
"""

import functools
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.plain as plain
import ray_fed.tensorflow.datasets as datasets
import ray_fed.tensorflow.specs as specs
from ray_fed.files import DataFile, describe_executor

SUFFIXES = (".tfrecord", ".tfrecords")

_KINDS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.int64): "int64_list",
    np.dtype(np.float32): "float_list",
    np.dtype(object): "bytes_list",
}
_HEADER = struct.Struct("<QI")
"""Length of a record and its checksum; the record follows, then its checksum."""
_CHECKSUM_BYTES = 4


def read(
    file: DataFile,
    leaves: Mapping[str, fl.TensorType],
    element: fl.Type,
    *,
    is_sequence: bool,
) -> Any:
    """Return a dataset of the examples, or all their features stacked.

    Args:
        file: to read; its first record is, at once, to check it.
        leaves: feature and type of each tensor; "" is the only feature.
        element: the type of an element, or of the whole.
        is_sequence: whether an example is one element; else tensors have one row an
            example.
    """
    path = file.local_path()
    first = next(iter(_stream(file)), None)
    if first is None and "" in leaves:
        raise file.mismatch("an example, or the name of a feature after a `#`", "none")
    if first is not None:
        leaves = _checked(file, first, leaves, is_sequence=is_sequence)
    dataset = (
        tf.data.TFRecordDataset(path)
        if path is not None
        else tf.data.Dataset.from_generator(
            lambda: _stream(file), output_signature=tf.TensorSpec([], tf.string)
        )
    )
    shapes = {
        name: leaf.shape if is_sequence else (leaf.shape or ())[1:]
        for name, leaf in leaves.items()
    }
    parsed = dataset.map(functools.partial(_parse, file, leaves, shapes))
    if is_sequence:
        return parsed.map(lambda *tensors: datasets.build(tensors, element))
    return _stacked(file, parsed, leaves, element)


def _stream(file: DataFile) -> Iterator[bytes]:
    """Yield the records of a file."""
    with file.open() as opened:
        while header := opened.read(_HEADER.size):
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
            record = opened.read(length)
            if len(header) < _HEADER.size or len(record) < length:
                raise file.mismatch("whole records", "a record cut short")
            opened.read(_CHECKSUM_BYTES)
            yield record


def _checked(
    file: DataFile,
    record: bytes,
    leaves: Mapping[str, fl.TensorType],
    *,
    is_sequence: bool,
) -> Mapping[str, fl.TensorType]:
    """Compare declared types with the first example; name what has no name."""
    try:
        example = tf.train.Example.FromString(record)
    except Exception as error:  # DecodeError, of whichever protobuf TensorFlow uses
        raise file.mismatch("records of tf.train.Example", "others") from error
    features = example.features.feature
    if "" in leaves:
        if len(features) != 1:
            raise file.mismatch(
                "one feature, or the name of one after a `#`",
                f"the features {sorted(features)}",
            )
        leaves = {next(iter(features)): leaves[""]}
    for name, leaf in leaves.items():
        if name not in features:
            raise file.mismatch(f"a feature `{name}`", f"features {sorted(features)}")
        kind = features[name].WhichOneof("kind")
        wanted = _KINDS.get(plain.storage_dtype(leaf))
        if wanted is None or kind not in (wanted, None):
            raise file.mismatch(f"`{leaf}` as the feature `{name}`", f"a `{kind}`")
        shape = leaf.shape if is_sequence else leaf.shape and leaf.shape[1:]
        if shape is None or None in shape[1:] or (not is_sequence and None in shape):
            raise file.mismatch(
                f"a shape whose first size alone may be unknown for `{name}`",
                f"`{leaf}`",
            )
    return leaves


def _parse(
    file: DataFile,
    leaves: Mapping[str, fl.TensorType],
    shapes: Mapping[str, Any],
    record: tf.Tensor,
) -> tuple[tf.Tensor, ...]:
    features = {
        name: tf.io.FixedLenSequenceFeature(
            [], specs.to_tf_dtype(leaf), allow_missing=True
        )
        for name, leaf in leaves.items()
    }
    parsed = tf.io.parse_single_example(record, features)
    return tuple(_laid(file, name, parsed[name], shapes[name]) for name in leaves)


def _laid(file: DataFile, name: str, values: tf.Tensor, shape: Any) -> tf.Tensor:
    sizes = [1 if size is None else size for size in shape]
    step, found = math.prod(sizes), tf.size(values)
    fits = tf.equal(found % step, 0) if None in shape else tf.equal(found, step)
    message = (
        f"Expected values of the shape {list(shape)} as the feature `{name}` of every"
        f" example in `{file.uri}`, found another number (read by"
        f" {describe_executor()})."
    )
    with tf.control_dependencies([tf.debugging.Assert(fits, [message, found])]):
        return tf.reshape(values, [-1 if size is None else size for size in shape])


def _stacked(
    file: DataFile,
    parsed: "tf.data.Dataset[Any]",
    leaves: Mapping[str, fl.TensorType],
    type_spec: fl.Type,
) -> Any:
    examples = list(parsed.as_numpy_iterator())
    arrays: list[Any] = []
    for index, (name, leaf) in enumerate(leaves.items()):
        shape = leaf.shape or ()
        if not shape or shape[0] not in (None, len(examples)):
            found = f"{len(examples)} examples"
            raise file.mismatch(f"`{leaf}` as all of the feature `{name}`", found)
        cells = [example[index] for example in examples]
        stacked = np.array(cells, plain.storage_dtype(leaf))
        arrays.append(stacked.reshape(len(examples), *shape[1:]))
    return plain.pack(iter(arrays), type_spec)
