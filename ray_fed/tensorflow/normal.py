"""The normal form of a value in TensorFlow: what the leaf executor holds and passes.

    TensorType      tf.Tensor on the executor's device
    StructType      Struct of normal forms
    SequenceType    tf.data.Dataset
    FunctionType    `Executable`, from normal form to normal form

Normalising a normal form again changes nothing.
"""

import contextlib
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import federated_language as fl
import tensorflow as tf

import ray_fed.draws as draws
import ray_fed.errors as errors
import ray_fed.plain as plain
import ray_fed.rows as rows
import ray_fed.tensorflow.callbacks as callbacks
import ray_fed.tensorflow.datasets as datasets
import ray_fed.tensorflow.external as external
import ray_fed.tensorflow.graph as graph
import ray_fed.tensorflow.loader as loader
import ray_fed.tensorflow.randomness as randomness
import ray_fed.tensorflow.specs as specs
import ray_fed.values as values

Normal = Any
"""A value in the normal form that the module describes."""


@dataclasses.dataclass(frozen=True)
class Executable:
    """A function of one argument, or of none, whose types its owner knows."""

    run: Callable[..., Normal]

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
    if isinstance(value, fl.framework.Data):
        value = plain.to_plain(value, type_spec)
    if isinstance(value, values.External):
        value = external.read(value.uri, type_spec)
    match type_spec:
        case fl.TensorType():
            return _normalise_tensor(value, type_spec)
        case fl.StructType():
            return values.Struct(
                (name, normalise(element, element_type))
                for (name, _), (element_type, _, element) in zip(
                    type_spec.items(),
                    values.struct_elements(value, type_spec),
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
                f" {values.show(value)}."
            )
        case _:
            raise errors.ValueMismatchError(
                "Expected a tensor, sequence, structure or function, found the type"
                f" `{type_spec}`: placements are for the executors above."
            )


def _normalise_tensor(value: Any, type_spec: fl.TensorType) -> tf.Tensor:
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        spec = specs.to_spec(type_spec)
        if value.dtype == spec.dtype and spec.shape.is_compatible_with(value.shape):
            return value
    checked = plain.to_plain(value, type_spec)
    return tf.constant(checked, specs.to_tf_dtype(type_spec))


def _normalise_sequence(value: Any, element: fl.Type) -> "tf.data.Dataset[Any]":
    if isinstance(value, rows.Rows):
        return datasets.from_rows(value, element)
    if isinstance(value, tf.data.Dataset):
        found = specs.infer_type(value)
        values.check_assignable(fl.SequenceType(element), found, "a dataset")
        return datasets.to_canonical(value, element)
    if isinstance(value, list | tuple):
        sequence = plain.to_plain(value, fl.SequenceType(element))
        return datasets.from_rows(sequence, element)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise errors.ValueMismatchError(
            f"Expected a dataset or another iterable of `{element}`, found"
            f" {values.show(value)}."
        )
    return datasets.from_iterable(value, element)


def flatten(value: Normal, type_spec: fl.Type) -> Iterator[tf.Tensor]:
    """Yield the tensors of a normal form in the order of its type.

    A sequence is the variant tensor of its dataset.
    """
    match type_spec:
        case fl.StructType():
            for (_, element), member in zip(type_spec.items(), value, strict=True):
                yield from flatten(member, element)
        case fl.SequenceType():
            yield tf.data.experimental.to_variant(value)
        case _:
            yield value


def unflatten(tensors: Iterator[tf.Tensor], type_spec: fl.Type) -> Normal:
    """Return the normal form that `flatten` took apart."""
    match type_spec:
        case fl.StructType():
            return values.Struct(
                (name, unflatten(tensors, element))
                for name, element in type_spec.items()
            )
        case fl.SequenceType():
            spec = specs.element_spec(type_spec.element)
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
            return values.Struct(
                (name, compute(member, element))
                for (name, element), member in zip(
                    type_spec.items(), value, strict=True
                )
            )
        case fl.SequenceType():
            return callbacks.call(datasets.to_elements, value, type_spec.element)
        case _:
            raise errors.ValueMismatchError(
                f"Expected a value to compute, found a function `{type_spec}`: call it."
            )


def _makes_dataset(result: fl.Type) -> bool:
    return fl.framework.type_contains(
        result, lambda found: isinstance(found, fl.SequenceType)
    )


def _device_for(result: fl.Type, device: str | None) -> str | None:
    """Return the device of a function: datasets exist on CPUs only."""
    if device is not None and "CPU" not in device and _makes_dataset(result):
        return "/device:CPU:0"
    return device


def _unkeyed(
    states: randomness.RandomStates, result: fl.Type, origin: str, content: bytes
) -> list[draws.Unkeyed]:
    """Return what a call of a loaded function has to note, at most one."""
    ops = [*states.unkeyed]
    if _makes_dataset(result):  # read after the call, when another may have set states
        ops += states.in_functions
    if not ops:
        return []
    return [draws.Unkeyed(origin, content.hex()[:12], tuple(ops))]


def load_function(message: Any, type_spec: fl.Type, device: str | None) -> Executable:
    """Return a TensorFlow message as a function from normal form to normal form.

    Args:
        message: a `pb.TensorFlow`.
        type_spec: of the function.
        device: name of the device to run on; None leaves it to TensorFlow.
    """
    function_type = cast("fl.FunctionType", type_spec)
    parameter = function_type.parameter
    graph_def = graph.graph_of(message)
    # Not the message's own bytes: draws must not depend on the line of the source.
    serialised = graph_def.SerializeToString(deterministic=True)
    content = hashlib.sha256(serialised).digest()
    origin = graph.origin_of(message)
    states = randomness.key_random_ops(graph_def)
    loader.isolate(graph_def, message.initialize_op or None)
    feeds = graph.bound_names(message.parameter) if parameter is not None else []
    tokens = [message.session_token_tensor_name] * bool(
        message.session_token_tensor_name
    )
    fetches = graph.bound_names(message.result)
    device = _device_for(function_type.result, device)
    with tf.device(device):
        function = loader.import_function(graph_def, feeds + tokens, fetches)
        states.create()
    unkeyed = _unkeyed(states, function_type.result, origin, content)
    one_at_a_time = threading.Lock() if states.names else contextlib.nullcontext()

    def run(arg: Normal = None) -> Normal:
        with one_at_a_time, tf.device(device), errors.naming_origin(origin):
            states.set(content)
            draws.note_unkeyed(unkeyed)
            tensors = [tf.constant("") for _ in tokens]
            if parameter is not None:
                taken = list(flatten(arg, parameter))
                tensors = graph.to_bound(taken, message.parameter) + tensors
            results = graph.from_bound(
                callbacks.call(function, tensors), message.result
            )
        return unflatten(iter(results), function_type.result)

    executable = Executable(run)
    weakref.finalize(executable, states.close)
    return executable
