"""Converts sequences to datasets of TensorFlow, and datasets to rows or elements.

tf.data orders the tensors of an element by sorted names if the container is a mapping.
So graphs always take and return sequences whose elements are nested OrderedDicts and
tuples, the *canonical* containers. Each process derives them from the type alone.
"""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import federated_language as fl
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.values.plain_values as plain_values
from ray_fed.language import trees, type_checks
from ray_fed.language.structs import Plain, to_struct
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence, read_limits, stored, tensor_structures


def element_spec(element: fl.Type, *, canonical: bool = True) -> Any:
    """Return the `element_spec` of a dataset with elements of a type.

    If `canonical`, containers are canonical. Otherwise they are the containers of the
    type. Raises TypeError for an element that contains anything but tensors.
    """
    if isinstance(element, fl.TensorType):
        return specs.to_spec(element)
    if not isinstance(element, fl.StructType):
        raise TypeError(f"Expected elements made of tensors, found `{element}`.")
    members = [
        (name, element_spec(member, canonical=canonical))
        for name, member in element.items()
    ]
    return build_container(members, None if canonical else element.python_container)


def build_container(
    elements: list[tuple[str | None, Any]], container: type[Any] | None
) -> Any:
    """Return pairs of a name and a value as a container of the class `container`.

    If it is None, the result is an OrderedDict for elements with names, and a tuple for
    elements without. Raises TypeError if only some elements have names.
    """
    names = [name for name, _ in elements if name is not None]
    if names and len(names) != len(elements):
        raise TypeError(
            f"Expected all elements or none to have names, found {len(names)} names"
            f" for {len(elements)} elements: TensorFlow has no container for that."
        )
    if container is None:
        container = collections.OrderedDict if names else tuple
    build: Any = container
    if not names:
        return build(value for _, value in elements)
    if issubclass(container, Mapping):
        return build(elements)
    return build(**dict(cast("list[tuple[str, Any]]", elements)))


def contains_unordered(element: fl.Type, actual: fl.Type | None = None) -> bool:
    """Return whether tf.data orders tensors differently than in canonical containers.

    The names in `element` decide the canonical order. `actual` is the same structure in
    the containers of the dataset, by default `element`.
    """
    actual = element if actual is None else actual
    if not isinstance(element, fl.StructType) or not isinstance(actual, fl.StructType):
        return False
    names = [name for name, _ in element.items()]
    container = actual.python_container
    reorders = (
        None not in names
        and container is not None
        and not issubclass(container, Mapping)
        and names != sorted(cast("list[str]", names))
    )
    members = zip(element.items(), actual.items(), strict=True)
    return reorders or any(contains_unordered(e, f) for (_, e), (_, f) in members)


def to_containers(value: Any, element: fl.Type, *, canonical: bool) -> Any:
    """Return tensors in canonical containers or, if not `canonical`, in the type's."""
    if not isinstance(element, fl.StructType):
        return value
    members = zip(element.items(), to_struct(value), strict=True)
    return build_container(
        [
            (name, to_containers(member, member_type, canonical=canonical))
            for (name, member_type), member in members
        ],
        None if canonical else element.python_container,
    )


class KnownSequence:
    """A sequence that has more than a dataset shows, such as rows in memory.

    `make_dataset` makes a dataset of the elements, in canonical containers.
    """

    def __init__(
        self, element: fl.Type, make_dataset: Callable[[], "tf.data.Dataset[Any]"]
    ) -> None:
        self.element = element
        self._make_dataset = make_dataset

    @functools.cached_property
    def dataset(self) -> "tf.data.Dataset[Any]":
        """A dataset of the elements, in canonical containers, made on first use."""
        return self._make_dataset()

    def as_sequence_of(self, element: fl.Type) -> Any:
        """Return this sequence as a sequence with elements of another type.

        Raises ValueMismatchError if the own type is not assignable to that type.
        """
        if element == self.element:
            return self
        declared, own_type = map(fl.SequenceType, (element, self.element))
        type_checks.check_assignable(declared, own_type, "a sequence")
        return self._with_element(element)

    def _with_element(self, element: fl.Type) -> Any:
        return to_canonical(self.dataset, element)


class HeldSequence(KnownSequence):
    """A sequence whose rows are in memory, as a `ColumnarSequence`."""

    def __init__(
        self, sequence: columnar_sequence.ColumnarSequence, element: fl.Type
    ) -> None:
        super().__init__(element, lambda: from_columns(sequence, element))
        self._sequence = sequence

    @functools.cached_property
    def tensors(self) -> list[tf.Tensor]:
        """The result of `to_tensors`, on the device that is current on first use."""
        return to_tensors(self._sequence, self.element)

    @override
    def _with_element(self, element: fl.Type) -> "HeldSequence":
        return HeldSequence(self._sequence, element)

    def elements(self) -> list[Any]:
        """Return all elements as new NumPy values in structs."""
        return [
            trees.unflatten(map(_copied, tensors), self.element)
            for tensors in self._sequence
        ]


def _copied(tensor: Any) -> Any:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor


def from_columns(
    sequence: columnar_sequence.ColumnarSequence, element: fl.Type
) -> "tf.data.Dataset[Any]":
    """Return a dataset of the elements of a plain sequence, in canonical containers."""
    tensor_types = tensor_structures.flatten_type(element)
    batches = {(column.batch_size, len(column.rows)) for column in sequence.columns}
    batch_size = next(iter(batches))[0] if len(batches) == 1 else None
    if all(_is_fixed(tensor_type) for tensor_type in tensor_types):
        return tf.data.Dataset.from_tensor_slices(_tensors(sequence, element))
    if batch_size is not None:
        flat = tf.data.Dataset.from_tensor_slices(_tensors(sequence, element))
        return flat.batch(batch_size)
    return tf.data.Dataset.from_generator(
        lambda: (build(tensors, element) for tensors in sequence),
        output_signature=element_spec(element),
    )


def to_tensors(
    sequence: columnar_sequence.ColumnarSequence, element: fl.Type
) -> list[tf.Tensor]:
    """Return a plain sequence as tensors, the inputs of a graph without tf.data.

    A column is one tensor of each element, for all elements. It has a tensor of rows,
    stacked or concatenated. If the elements' first dimension may differ, a tensor of
    splits follows: the index of each element's first row. The number of elements,
    i64[], is last. Other dimensions must be known.
    """
    tensors: list[tf.Tensor] = []
    for column, tensor_type in zip(
        sequence.columns, tensor_structures.flatten_type(element), strict=True
    ):
        dtype = specs.to_tf_dtype(tensor_type)
        if _is_fixed(tensor_type):
            tensors.append(tf.constant(column.rows, dtype))
            continue
        ragged = column.with_splits()
        splits: Any = ragged.splits
        tensors.extend([tf.constant(ragged.rows, dtype), tf.constant(splits, tf.int64)])
    return [*tensors, tf.constant(len(sequence), tf.int64)]


def from_iterable(iterable: Any, element: fl.Type) -> "tf.data.Dataset[Any]":
    """Return a dataset that reads an iterable lazily and checks each element.

    Each pass iterates over `iterable` again. An iterator allows a single pass.
    """

    def read() -> Any:
        for index, member in enumerate(iterable):
            checked = plain_values.to_plain(member, element, f"element {index}")
            yield build(trees.flatten(checked), element)

    return tf.data.Dataset.from_generator(read, output_signature=element_spec(element))


def from_variant(variant: tf.Tensor, element: fl.Type) -> "tf.data.Dataset[Any]":
    """Return the dataset of a variant tensor, in the containers of the type `element`.

    In the variant tensor, elements are in canonical containers.
    """
    spec = element_spec(element)
    dataset = tf.data.experimental.from_variant(variant, spec)
    if contains_unordered(element):
        return _rebuild(dataset, element, canonical=False)
    declared = element_spec(element, canonical=False)
    return tf.data.experimental.from_variant(variant, declared)


def to_canonical(
    dataset: "tf.data.Dataset[Any]", element: fl.Type
) -> "tf.data.Dataset[Any]":
    """Return a dataset with its elements in canonical containers.

    This is `dataset` itself if its tensors already have the canonical order.
    """
    own_element = cast("fl.SequenceType", specs.infer_type(dataset)).element
    if not contains_unordered(element, own_element):
        return dataset
    return _rebuild(dataset, element, canonical=True)


def _rebuild(
    dataset: "tf.data.Dataset[Any]", element: fl.Type, *, canonical: bool
) -> "tf.data.Dataset[Any]":
    is_spread = type(dataset.element_spec) is tuple  # map makes arguments of a tuple

    @tf.autograph.experimental.do_not_convert
    def convert(*args: Any) -> Any:
        member = args if is_spread else args[0]
        return to_containers(member, element, canonical=canonical)

    return dataset.map(convert)


def to_elements(dataset: "tf.data.Dataset[Any]", element: fl.Type) -> list[Any]:
    """Iterate over a dataset and return its elements as NumPy values in structs.

    Raises ValueMismatchError if the dataset has no end, or is too large.
    """
    meter = read_limits.Meter("a dataset")
    elements: list[Any] = []
    for member in plain_values.iterate_dataset(dataset):
        arrays = [tensor.numpy() for tensor in tf.nest.flatten(member)]
        elements.append(_structured(tf.nest.pack_sequence_as(member, arrays), element))
        meter.add(max(1, sum(map(stored.count_bytes, arrays))))
    return elements


def _structured(member: Any, element: fl.Type) -> Any:
    checked: Plain = plain_values.to_plain(member, element)
    return trees.unflatten(iter(trees.flatten(checked)), element)


def _is_fixed(type_spec: fl.TensorType) -> bool:
    return type_spec.shape is not None and None not in type_spec.shape


def _tensors(sequence: columnar_sequence.ColumnarSequence, element: fl.Type) -> Any:
    return build([column.rows for column in sequence.columns], element)


def build(tensors: Any, element: fl.Type) -> Any:
    """Return an element in canonical containers, from tensors in its type's order."""
    packed = trees.unflatten(iter(tensors), element)
    return to_containers(packed, element, canonical=True)
