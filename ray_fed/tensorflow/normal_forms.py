"""The normal form of a value in TensorFlow: what the leaf executor holds and passes.

    TensorType      tf.Tensor on the executor's device
    StructType      Struct of normal forms
    SequenceType    `HeldSequence` of what was given as rows or as a list;
                    tf.data.Dataset of what is read lazily
    FunctionType    `Executable`, from normal form to normal form

Normalising a normal form again changes nothing.

A TensorFlow message is loaded as a function of normal forms. Where it takes sequences,
and can do without tf.data, it is loaded so (see `lowering`); given a dataset that is
read lazily it runs as it was written.

A sequence that a computation returned is made when somebody asks for its elements. A
computation that takes one is composed with the one that returned it, as kernels do: no
dataset is set up between them, and the bits are those of kernels.
"""

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import federated_language as fl
import tensorflow as tf

import ray_fed.errors as errors
import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.lowering as lowering
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.values.plain_values as plain_values
from ray_fed.language import structs, type_checks
from ray_fed.plan import diagnostics
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow import external_data
from ray_fed.tensorflow.graphs import callbacks, identity
from ray_fed.tensorflow.graphs.graph_message import TensorFlowMessage
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import columnar_sequence, stored
from ray_fed.values.client_references import ClientMember
from ray_fed.values.lru_cache import LruCache

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
            return external_data.FileSequence(value.uri, type_spec)
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


class ReturnedSequence(datasets.KnownSequence):
    """A sequence that a computation without state returned.

    Args:
        message: of the computation, or of several, composed.
        types: of what it takes, in order.
        leaves: that it was given: tensors and sequences.
        element: the type of the elements.
        run: makes a dataset of the elements.
    """

    def __init__(
        self,
        message: TensorFlowMessage,
        types: Sequence[fl.Type],
        leaves: Sequence[Normal],
        element: fl.Type,
        run: Callable[[], "tf.data.Dataset[Any]"],
    ) -> None:
        self.message, self.types, self.leaves = message, types, leaves
        super().__init__(element, run)

    @classmethod
    def of(
        cls,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        arg: Normal,
        run: Callable[[], "tf.data.Dataset[Any]"],
    ) -> Self:
        """Return what a computation returns of an argument."""
        leaves = leaves_of(arg, type_spec.parameter)
        element = cast("fl.SequenceType", type_spec.result).element
        try:
            message, type_spec, leaves = graph_message.compose_all(
                message, type_spec, leaves, ReturnedSequence
            )
        except Fallback:
            leaves = [
                leaf.dataset if isinstance(leaf, ReturnedSequence) else leaf
                for leaf in leaves
            ]
        types = graph_message.flat_types(type_spec.parameter)
        return cls(message, types, leaves, element, run)


def _device_for(result: fl.Type, device: str | None) -> str | None:
    """Return the device of a function: datasets exist on CPUs only."""
    if device is not None and "CPU" not in device and _contains_sequences(result):
        return "/device:CPU:0"
    return device


def _contains_sequences(type_spec: fl.Type) -> bool:
    return fl.framework.type_contains(
        type_spec, lambda part: isinstance(part, fl.SequenceType)
    )


def load_function(
    message: TensorFlowMessage,
    type_spec: fl.Type,
    device: str | None,
    *,
    lowers: bool = True,
) -> Executable:
    """Return a TensorFlow message as a function from normal form to normal form.

    Args:
        message: a `pb.TensorFlow`.
        type_spec: of the function.
        device: name of the device to run on; None leaves it to TensorFlow.
        lowers: whether it may run without tf.data; else it runs as it was written.
    """
    function_type = cast("fl.FunctionType", type_spec)
    source = loader.Source(
        graph_message.origin_of(message),
        identity.content_of(message),
        _device_for(function_type.result, device),
        _contains_sequences(function_type.result),
        functools.partial(graph_message.find_place, message),
    )
    written = _Written(message, function_type, source)
    parameter = function_type.parameter
    if parameter is None or not lowers or not _contains_sequences(parameter):
        written.load()
        return Executable(written)
    lowered = _load_lowered(message, function_type, source)
    if isinstance(lowered, Fallback):
        written.load()
        written.tell(lowered.reason)
        return Executable(written, lowered.reason)
    return Executable(_Lowered(lowered, written, function_type))


def _load_lowered(
    message: TensorFlowMessage, type_spec: fl.FunctionType, source: loader.Source
) -> loader.LoadedGraph | Fallback:
    lowered = lowering.lower(message, type_spec)
    if isinstance(lowered, Fallback):
        return lowered
    try:
        return loader.LoadedGraph(
            lowered.graph_def,
            lowered.feeds,
            lowered.fetches,
            lowered.initialize_op,
            source,
        )
    except Exception as error:  # noqa: BLE001 (no graph is refused for its lowering)
        return Fallback(f"{type(error).__name__}: {error}")


_COMPOSED = 16
"""Graphs of a computation and of those before it that stay loaded."""


class _Written:
    """A message as it was written, loaded when it is needed."""

    def __init__(
        self,
        message: TensorFlowMessage,
        type_spec: fl.FunctionType,
        source: loader.Source,
    ) -> None:
        self.message = message
        self._type_spec = type_spec
        self.source = source
        self._notes: list[diagnostics.Note] = []
        self._loading = threading.Lock()
        self._graph: loader.LoadedGraph | None = None

    def load(self) -> loader.LoadedGraph:
        """Return the loaded graph, the same each time."""
        message = self.message
        with self._loading:
            if self._graph is None:
                feeds: list[str] = []
                if self._type_spec.parameter is not None:
                    feeds = graph_message.bound_names(message.parameter)
                if message.session_token_tensor_name:
                    feeds = [*feeds, message.session_token_tensor_name]
                self._graph = loader.LoadedGraph(
                    graph_message.graph_of(message),
                    feeds,
                    graph_message.bound_names(message.result),
                    message.initialize_op or None,
                    self.source,
                )
            return self._graph

    def tell(self, reason: str) -> None:
        """Let every call note why the function is not lowered."""
        origin, content = self.source.origin, self.source.content
        self._notes = [
            diagnostics.ComputationUnlowered(origin, content.hex()[:12], reason)
        ]

    def __call__(self, arg: Normal = None) -> Normal:
        message, type_spec = self.message, self._type_spec

        def take() -> list[tf.Tensor]:
            tensors: list[Any] = []
            if type_spec.parameter is not None:
                leaves = list(flatten(arg, type_spec.parameter))
                tensors = graph_message.to_bound(leaves, message.parameter)
            if message.session_token_tensor_name:
                tensors.append(tf.constant(""))
            return tensors

        def run() -> Normal:
            diagnostics.note(self._notes)
            results = graph_message.from_bound(self.load()(take), message.result)
            return unflatten(iter(results), type_spec.result)

        if isinstance(type_spec.result, fl.SequenceType) and self._is_stateless:
            return ReturnedSequence.of(message, type_spec, arg, run)
        return run()

    @functools.cached_property
    def _is_stateless(self) -> bool:
        return inlining.find_effects(self.message) is None


class _Lowered:
    """A message without tf.data; called with a dataset, as it was written."""

    def __init__(
        self,
        lowered: loader.LoadedGraph,
        written: _Written,
        type_spec: fl.FunctionType,
    ) -> None:
        self._graph = lowered
        self._written = written
        self._type_spec = type_spec
        self._composed: LruCache[bytes, loader.LoadedGraph | Fallback]
        self._composed = LruCache(_COMPOSED)

    def _compose(
        self, leaves: Sequence[Normal]
    ) -> tuple[loader.LoadedGraph, Sequence[Normal]] | None:
        """Return a graph of what returned sequences were made of, and that."""
        written = self._written
        try:
            composed = graph_message.compose_all(
                written.message, self._type_spec, leaves, ReturnedSequence
            )
        except Fallback:
            return None
        message, type_spec, arguments = composed
        key = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
        graph = self._composed.get(
            key, lambda: _load_lowered(message, type_spec, written.source)
        )
        if isinstance(graph, Fallback):
            return None
        return graph, arguments

    def __call__(self, arg: Normal) -> Normal:
        parameter = cast("fl.Type", self._type_spec.parameter)
        graph, leaves = self._graph, leaves_of(arg, parameter)
        if any(isinstance(leaf, ReturnedSequence) for leaf in leaves):
            composed = self._compose(leaves)
            if composed is None:
                return self._written(arg)
            graph, leaves = composed
        leaves = [
            leaf.load() if isinstance(leaf, external_data.FileSequence) else leaf
            for leaf in leaves
        ]
        if not all(isinstance(x, tf.Tensor | datasets.HeldSequence) for x in leaves):
            return self._written(arg)

        def take() -> list[tf.Tensor]:
            tensors: list[Any] = []
            for leaf in leaves:
                if isinstance(leaf, datasets.HeldSequence):
                    tensors += leaf.tensors
                else:
                    tensors.append(leaf)
            return tensors

        return unflatten(iter(graph(take)), self._type_spec.result)
