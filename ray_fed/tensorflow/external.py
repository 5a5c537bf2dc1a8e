"""External data: files that a computation names, read where the executor runs.

The content of a `Data` building block is a `google.protobuf.StringValue` that holds a
path in the executor's file system. What is there depends on the declared type:

    TensorType      a file of `np.save`
    StructType      a file of `np.savez`: tensors by name, or by position without names
    SequenceType    a folder of `tf.data.Dataset.save`, read as elements are needed

Nothing is unpickled.
"""

import collections
import pathlib
from collections.abc import Mapping
from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf
from google.protobuf import wrappers_pb2

import ray_fed.errors as errors


def read_data(block: fl.framework.Data, type_spec: fl.Type) -> Any:
    """Return the value that a block names, as a user would write it.

    Args:
        block: names a file or a folder.
        type_spec: of the value; decides how it is read.

    Raises:
        UnsupportedError: the block names no file, or one that holds something else.
    """
    path = _path_of(block)
    try:
        if isinstance(type_spec, fl.SequenceType):
            return _in_order(tf.data.Dataset.load(str(path)), type_spec.element)
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found as archive:
            return _members(archive, type_spec)
    except (OSError, ValueError, EOFError, tf.errors.OpError) as error:
        raise errors.UnsupportedError(
            f"Expected a value of type `{type_spec}` at `{path}`, found none: write it"
            " with np.save, np.savez (structures) or tf.data.Dataset.save (sequences)."
        ) from error


def _path_of(block: fl.framework.Data) -> pathlib.Path:
    text = wrappers_pb2.StringValue()
    if not block.content.Unpack(text):
        raise errors.UnsupportedError(
            "Expected external data to be a path in a google.protobuf.StringValue,"
            f" found `{block.content.type_url}`."
        )
    path = pathlib.Path(text.value)
    if not path.exists():
        raise errors.UnsupportedError(
            f"Expected a file at `{path}`, found none: external data must be where"
            " the executor runs."
        )
    return path


def _in_order(dataset: Any, element: fl.Type) -> Any:
    """Return a dataset with the fields of dicts in the order of their type.

    TensorFlow saves them in an order that changes from one process to the next.
    """
    if not isinstance(dataset.element_spec, Mapping):
        return dataset

    def sort(value: Any) -> Any:
        return _sorted(value, element)

    return dataset.map(sort)


def _sorted(value: Any, type_spec: fl.Type) -> Any:
    if not isinstance(value, Mapping) or not isinstance(type_spec, fl.StructType):
        return value
    types = dict(type_spec.items())
    names = list(types) if set(types) == set(value) else list(value)
    return collections.OrderedDict(
        (name, _sorted(value[name], types.get(name, type_spec))) for name in names
    )


def _members(archive: Any, type_spec: fl.Type) -> Any:
    if isinstance(type_spec, fl.StructType) and None in dict(type_spec.items()):
        return [archive[name] for name in archive.files]
    return {name: archive[name] for name in archive.files}
