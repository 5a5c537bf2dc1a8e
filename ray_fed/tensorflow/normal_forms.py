"""The normal form of a value: how the executor that runs TensorFlow keeps values.

    TensorType      tf.Tensor on the device of the executor
    StructType      Struct of normal forms
    SequenceType    `HeldSequence` if the elements are rows or in a list,
                    tf.data.Dataset if they are read lazily
    FunctionType    `Executable`, from normal form to normal form

Normalizing a normal form again does not change it.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.language import structs, trees, type_checks
from ray_fed.tensorflow import external_data
from ray_fed.tensorflow.graphs import callbacks
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence, stored
from ray_fed.values.client_references import ClientMember

Normal = Any
"""A value in the normal form that the module describes."""


@dataclasses.dataclass(frozen=True)
class Executable:
    """A loaded function of one argument, or of none.

    Attributes:
        run: The function, from normal form to normal form.
        unlowered: The reason why it reads its sequences through tf.data, or None.
    """

    run: Callable[..., Normal]
    unlowered: str | None = None

    def __call__(self, *args: Normal) -> Normal:
        """Return the result of `run`."""
        return self.run(*args)


def normalize(value: Any, type_spec: fl.Type) -> Normal:
    """Check a value against a type and return its normal form.

    The value can be in normal form, in plain form (`ray_fed.values.plain_values`), or
    any Python value of the type. Raises ValueMismatchError if the value does not have
    the type, or if the type has a placement.
    """
    value = _read(value, type_spec)
    match type_spec:
        case fl.TensorType():
            return _normalize_tensor(value, type_spec)
        case fl.StructType():
            return structs.Struct(
                (name, normalize(element, element_type))
                for (name, _), (element_type, _, element) in zip(
                    type_spec.items(),
                    structs.struct_elements(value, type_spec),
                    strict=True,
                )
            )
        case fl.SequenceType():
            return _normalize_sequence(value, type_spec.element)
        case fl.FunctionType() if isinstance(value, Executable):
            return value
        case fl.FunctionType():
            raise errors.ValueMismatchError(
                f"Expected a computation of type `{type_spec}`, found"
                f" {structs.show(value)}."
            )
        case _:
            raise errors.ValueMismatchError(
                "Expected a tensor, sequence, structure or function, found the type"
                f" `{type_spec}`: placements are for the executors above."
            )


def _read(value: Any, type_spec: fl.Type) -> Any:
    if isinstance(value, fl.framework.Data):
        value = plain_values.to_plain(value, type_spec)
    if isinstance(value, stored.External):
        if isinstance(type_spec, fl.SequenceType):
            return external_data.FileSequence(value.uri, type_spec)
        return external_data.read(value.uri, type_spec)
    return value.read() if isinstance(value, ClientMember) else value


def _normalize_tensor(value: Any, type_spec: fl.TensorType) -> tf.Tensor:
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        spec = specs.to_spec(type_spec)
        if value.dtype == spec.dtype and spec.shape.is_compatible_with(value.shape):
            return value
    checked = plain_values.to_plain(value, type_spec)
    return tf.constant(checked, specs.to_tf_dtype(type_spec))


def _normalize_sequence(
    value: Any, element: fl.Type
) -> "datasets.KnownSequence | tf.data.Dataset[Any]":
    if isinstance(value, datasets.KnownSequence):
        return value.as_sequence_of(element)
    if isinstance(value, columnar_sequence.ColumnarSequence):
        return datasets.HeldSequence(value, element)
    if isinstance(value, tf.data.Dataset):
        own_type = specs.infer_type(value)
        type_checks.check_assignable(fl.SequenceType(element), own_type, "a dataset")
        return datasets.to_canonical(value, element)
    if isinstance(value, list | tuple):
        sequence = plain_values.to_plain(value, fl.SequenceType(element))
        return datasets.HeldSequence(sequence, element)
    if not stored.is_listed(value):
        raise errors.ValueMismatchError(
            f"Expected a dataset or another iterable of `{element}`, found"
            f" {structs.show(value)}."
        )
    return datasets.from_iterable(value, element)


def move(value: Normal, type_spec: fl.Type, device: str) -> Normal:
    """Return a value in normal form with its tensors of numbers on a logical device.

    Sequences and strings stay where they are, because not every device can hold them.
    """

    def move_leaf(leaf: Normal, leaf_type: fl.Type) -> Normal:
        is_number = isinstance(leaf_type, fl.TensorType) and leaf.dtype != tf.string
        if not is_number or leaf.device.endswith(device):
            return leaf
        with tf.device(device):
            return tf.identity(leaf)

    return trees.map_leaves(move_leaf, value, type_spec)


def flatten(value: Normal, type_spec: fl.Type) -> list[tf.Tensor]:
    """Return the tensors of a value in normal form, in the order of its type.

    A sequence has one variant tensor, which TensorFlow uses for a dataset.
    """
    tensors: list[tf.Tensor] = []
    for leaf in trees.leaves(value, type_spec):
        tensor = leaf.dataset if isinstance(leaf, datasets.KnownSequence) else leaf
        if isinstance(tensor, tf.data.Dataset):
            tensor = tf.data.experimental.to_variant(tensor)
        tensors.append(tensor)
    return tensors


def unflatten(tensors: Iterable[tf.Tensor], type_spec: fl.Type) -> Normal:
    """Build a value in normal form from the tensors that `flatten` returned."""

    def read(tensor: tf.Tensor, leaf_type: fl.Type) -> Normal:
        if not isinstance(leaf_type, fl.SequenceType):
            return tensor
        spec = datasets.element_spec(leaf_type.element)
        return tf.data.experimental.from_variant(tensor, spec)

    leaves = map(read, tensors, trees.leaf_types(type_spec))
    return trees.unflatten(leaves, type_spec)


def compute(value: Normal, type_spec: fl.Type) -> Any:
    """Return a value in normal form as NumPy values in structs.

    A sequence becomes a list. Raises ValueMismatchError for a type with functions.
    """
    return trees.map_leaves(_compute_leaf, value, type_spec)


def _compute_leaf(value: Normal, type_spec: fl.Type) -> Any:
    match type_spec:
        case fl.TensorType():
            return value.numpy()
        case fl.SequenceType() if isinstance(value, datasets.HeldSequence):
            return value.elements()
        case fl.SequenceType() if isinstance(value, datasets.KnownSequence):
            return callbacks.call(datasets.to_elements, value.dataset, value.element)
        case fl.SequenceType():
            return callbacks.call(datasets.to_elements, value, type_spec.element)
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value to compute, found a function `{type_spec}`: call it."
            )
