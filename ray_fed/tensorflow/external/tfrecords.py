"""TFRecord files of `tf.train.Example`: features by the names of declared elements.

An example knows int64, float32 and strings, each as a list of values without a shape:
they are laid in the declared shape, in row-major order.

A file is a row of records, each as

    length u64 | checksum of the length u32 | data | checksum of the data u32

Both checksums of every record are verified, wherever the file lies: runs of whole
records are copied to a file in memory that TensorFlow reads. TensorFlow alone would
take a file that ends inside the first twelve bytes of a record for a whole one.
"""

import functools
import math
import struct
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf

import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.files.opening import DataFile, describe_executor
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import tensor_structures

SUFFIXES = (".tfrecord", ".tfrecords")

_KINDS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.int64): "int64_list",
    np.dtype(np.float32): "float_list",
    np.dtype(object): "bytes_list",
}
_HEADER = struct.Struct("<QI")
"""Length of a record, and the checksum of its length."""

_FRAME_BYTES = _HEADER.size + 4
"""What a record takes beside its data."""

_RUN_BYTES = 4 * 2**20
"""What is read at once; a run of records is as long, or one record."""

_FIRST_BYTES = 64 * 2**10
"""What is read at once to look at the first record alone."""

_ALL = 2**62
"""Records of a batch that holds all there are."""


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
    first = next((run[0] for run in _runs(file, _FIRST_BYTES)), None)
    if first is None and "" in leaves:
        raise file.mismatch("an example, or the name of a feature after a `#`", "none")
    if first is not None:
        record = cast("bytes", first.numpy())
        leaves = _checked(file, record, leaves, is_sequence=is_sequence)
    dataset = tf.data.Dataset.from_generator(
        lambda: _runs(file), output_signature=tf.TensorSpec([None], tf.string)
    ).unbatch()
    shapes = {
        name: leaf.shape if is_sequence else (leaf.shape or ())[1:]
        for name, leaf in leaves.items()
    }
    parsed = dataset.map(functools.partial(_parse, file, leaves, shapes))
    if is_sequence:
        return parsed.map(lambda *tensors: datasets.build(tensors, element))
    return _stacked(file, parsed, leaves, element)


def _runs(file: DataFile, num_bytes: int = _RUN_BYTES) -> Iterator[tf.Tensor]:
    """Yield the data of all records as vectors of strings.

    Args:
        file: to read.
        num_bytes: to read at once.

    Raises:
        ValueMismatchError: a record is damaged, or cut short.
    """
    held, offset = bytearray(), 0
    with file.open() as opened:
        while read := opened.read(num_bytes):
            held += read
            end = _end_of_whole(file, held, offset)
            if end:
                yield _verified(file, bytes(held[:end]), offset)
                del held[:end]
                offset += end
    if held:
        raise file.damaged(f"the record at byte {offset} cut short")


def _end_of_whole(file: DataFile, held: bytearray, offset: int) -> int:
    """Return where the whole records that begin a run of bytes end.

    Args:
        file: for errors.
        held: begins with a record.
        offset: of these bytes in the file.
    """
    end = 0
    while end + _HEADER.size <= len(held):
        length, checksum = _HEADER.unpack_from(held, end)
        if end + _FRAME_BYTES + length > len(held):
            # Or a damaged length would have the rest of the file read into memory.
            if _masked_crc32c(held[end : end + 8]) != checksum:
                raise file.damaged(f"a damaged record at byte {offset + end}")
            break
        end += _FRAME_BYTES + length
    return end


def _masked_crc32c(data: bytes | bytearray) -> int:
    """Return the checksum of the format, of a few bytes: bit by bit is slow."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _verified(file: DataFile, run: bytes, offset: int) -> tf.Tensor:
    """Return the data of a run of whole records, read by TensorFlow."""
    name = f"ram://ray_fed/{uuid.uuid4().hex}"
    try:
        with tf.device("/device:CPU:0"):
            with tf.io.gfile.GFile(name, "wb") as copied:
                copied.write(run)
            records: Any = tf.data.TFRecordDataset(name)
            return records.batch(_ALL).get_single_element()
    except tf.errors.DataLossError as error:
        raise file.damaged(f"a damaged record after byte {offset}") from error
    finally:
        if tf.io.gfile.exists(name):
            tf.io.gfile.remove(name)


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
        wanted = _KINDS.get(tensor_structures.storage_dtype(leaf))
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
    examples = list(plain_values.iterate_dataset(parsed))
    arrays: list[Any] = []
    for index, (name, leaf) in enumerate(leaves.items()):
        shape = leaf.shape or ()
        if not shape or shape[0] not in (None, len(examples)):
            found = f"{len(examples)} examples"
            raise file.mismatch(f"`{leaf}` as all of the feature `{name}`", found)
        cells = [example[index].numpy() for example in examples]
        stacked = np.array(cells, tensor_structures.storage_dtype(leaf))
        arrays.append(stacked.reshape(len(examples), *shape[1:]))
    return tensor_structures.unflatten(iter(arrays), type_spec)
