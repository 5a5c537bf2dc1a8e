"""Sequences as datasets: built from rows, read back to rows or elements."""

from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.plain as plain
import ray_fed.rows as rows
import ray_fed.tensorflow.specs as specs
from ray_fed.values import Plain


def from_rows(sequence: rows.Rows, element: fl.Type) -> "tf.data.Dataset[Any]":
    """Return a dataset of the elements of a plain sequence, in canonical containers.

    Args:
        sequence: the plain sequence.
        element: the type of its elements.
    """
    tensor_types = plain.flatten_type(element)
    batch_sizes = {column.batch_size for column in sequence.columns}
    if all(_is_fixed(tensor_type) for tensor_type in tensor_types):
        return tf.data.Dataset.from_tensor_slices(_tensors(sequence, element))
    if len(batch_sizes) == 1 and batch_sizes != {None}:
        flat = tf.data.Dataset.from_tensor_slices(_tensors(sequence, element))
        return flat.batch(batch_sizes.pop() or 1)
    return tf.data.Dataset.from_generator(
        lambda: (_build(tensors, element) for tensors in sequence),
        output_signature=specs.element_spec(element),
    )


def from_iterable(iterable: Any, element: fl.Type) -> "tf.data.Dataset[Any]":
    """Return a dataset that reads an iterable lazily and checks each element.

    Args:
        iterable: of Python values of `element`; read again for every pass where it
            is not an iterator.
        element: the type of its elements.
    """

    def read() -> Any:
        for index, member in enumerate(iterable):
            checked = plain.to_plain(member, element, f"element {index}")
            yield _build(plain.flatten(checked, element), element)

    return tf.data.Dataset.from_generator(
        read, output_signature=specs.element_spec(element)
    )


def to_elements(dataset: "tf.data.Dataset[Any]", element: fl.Type) -> list[Any]:
    """Return all elements of a dataset, computed: numpy values in structs."""
    return [_structured(member, element) for member in dataset.as_numpy_iterator()]


def _structured(member: Any, element: fl.Type) -> Any:
    checked: Plain = plain.to_plain(member, element)
    return plain.pack(iter(plain.flatten(checked, element)), element)


def _is_fixed(type_spec: fl.TensorType) -> bool:
    return type_spec.shape is not None and None not in type_spec.shape


def _tensors(sequence: rows.Rows, element: fl.Type) -> Any:
    return _build([column.rows for column in sequence.columns], element)


def _build(tensors: Any, element: fl.Type) -> Any:
    packed = plain.pack(iter(tensors), element)
    return specs.to_containers(packed, element, canonical=True)
