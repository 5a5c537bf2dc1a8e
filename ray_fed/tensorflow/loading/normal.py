"""The normal form of a value in TensorFlow: what the leaf executor holds and passes.

    TensorType      tf.Tensor on the executor's device
    StructType      Struct of normal forms
    SequenceType    `HeldSequence` of what was given as rows or as a list;
                    tf.data.Dataset of what is read lazily
    FunctionType    `Executable`, from normal form to normal form

Normalising a normal form again changes nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.language import structs, type_checks
from ray_fed.tensorflow.external import external_data, held_rows
from ray_fed.tensorflow.graphs import callbacks
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence, stored
from ray_fed.values.client_references import ClientMember

Normal = Any
"""A value in the normal form that the module describes."""


@dataclasses.dataclass(frozen=True)
class Executable:
    """A function of one argument, or of none, whose types its owner knows.

    Attributes:
        run: does the work.
        unlowered: why it needs tf.data for the sequences that it takes; None where it
            does not, or takes none.
    """

    run: Callable[..., Normal]
    unlowered: str | None = None

    def __call__(self, *args: Normal) -> Normal:
        """Return the function's result."""
        return self.run(*args)


def normalise(value: Any, type_spec: fl.Type) -> Normal:
    """Return a value in the normal form of its type, checked.

    Args:
        value: a normal or plain form, or what a user writes for the type.
        type_spec: of tensors, sequences, structures, functions.

    Raises:
        ValueMismatchError: the value is not of the type, or the type is placed.
    """
    value = _read(value, type_spec)
    match type_spec:
        case fl.TensorType():
            return _normalise_tensor(value, type_spec)
        case fl.StructType():
            return structs.Struct(
                (name, normalise(element, element_type))
                for (name, _), (element_type, _, element) in zip(
                    type_spec.items(),
                    structs.struct_elements(value, type_spec),
                    strict=True,
                )
            )
        case fl.SequenceType():
            return _normalise_sequence(value, type_spec.element)
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
    """Return what a value stands for, if it stands for another."""
    if isinstance(value, fl.framework.Data):
        value = plain_values.to_plain(value, type_spec)
    if isinstance(value, stored.External):
        if isinstance(type_spec, fl.SequenceType):
            return held_rows.FileSequence(value.uri, type_spec)
        return external_data.read(value.uri, type_spec)
    return value.read() if isinstance(value, ClientMember) else value


def _normalise_tensor(value: Any, type_spec: fl.TensorType) -> tf.Tensor:
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        spec = specs.to_spec(type_spec)
        if value.dtype == spec.dtype and spec.shape.is_compatible_with(value.shape):
            return value
    checked = plain_values.to_plain(value, type_spec)
    return tf.constant(checked, specs.to_tf_dtype(type_spec))


def _normalise_sequence(
    value: Any, element: fl.Type
) -> "datasets.KnownSequence | tf.data.Dataset[Any]":
    if isinstance(value, datasets.KnownSequence):
        return value.as_sequence_of(element)
    if isinstance(value, columnar_sequence.ColumnarSequence):
        return datasets.HeldSequence(value, element)
    if isinstance(value, tf.data.Dataset):
        found = specs.infer_type(value)
        type_checks.check_assignable(fl.SequenceType(element), found, "a dataset")
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
    """Return a normal form with its tensors on a device; itself where they are there.

    Sequences and strings stay where they are: not every kind of device holds them.

    Args:
        value: of type `type_spec`.
        type_spec: its type.
        device: name of a logical device.
    """
    match type_spec:
        case fl.StructType():
            return structs.Struct(
                (name, move(member, element, device))
                for (name, element), member in zip(
                    type_spec.items(), value, strict=True
                )
            )
        case fl.TensorType() if value.dtype != tf.string:
            if value.device.endswith(device):
                return value
            with tf.device(device):
                return tf.identity(value)
        case _:
            return value


def flatten(value: Normal, type_spec: fl.Type) -> Iterator[tf.Tensor]:
    """Yield the tensors of a normal form in the order of its type.

    A sequence is the variant tensor of its dataset.
    """
    match type_spec:
        case fl.StructType():
            for (_, element), member in zip(type_spec.items(), value, strict=True):
                yield from flatten(member, element)
        case fl.SequenceType():
            dataset = value
            if isinstance(value, datasets.KnownSequence):
                dataset = value.dataset
            yield tf.data.experimental.to_variant(dataset)
        case _:
            yield value


def leaves_of(value: Normal, type_spec: fl.Type | None) -> list[Normal]:
    """Return the tensors and sequences of a normal form, in order."""
    if isinstance(type_spec, fl.StructType):
        members = zip(type_spec.items(), value, strict=True)
        return [leaf for (_, t), member in members for leaf in leaves_of(member, t)]
    return [] if type_spec is None else [value]


def unflatten(tensors: Iterator[tf.Tensor], type_spec: fl.Type) -> Normal:
    """Return the normal form that `flatten` took apart."""
    match type_spec:
        case fl.StructType():
            return structs.Struct(
                (name, unflatten(tensors, element))
                for name, element in type_spec.items()
            )
        case fl.SequenceType():
            spec = datasets.element_spec(type_spec.element)
            return tf.data.experimental.from_variant(next(tensors), spec)
        case _:
            return next(tensors)


def compute(value: Normal, type_spec: fl.Type) -> Any:
    """Return a normal form as numpy values in structs, a list for a sequence.

    Raises:
        ValueMismatchError: the type is, or holds, a function.
    """
    match type_spec:
        case fl.TensorType():
            return value.numpy()
        case fl.StructType():
            return structs.Struct(
                (name, compute(member, element))
                for (name, element), member in zip(
                    type_spec.items(), value, strict=True
                )
            )
        case fl.SequenceType() if isinstance(value, datasets.KnownSequence):
            return value.elements()
        case fl.SequenceType():
            return callbacks.call(datasets.to_elements, value, type_spec.element)
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value to compute, found a function `{type_spec}`: call it."
            )
