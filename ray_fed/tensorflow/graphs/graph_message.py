"""The `pb.TensorFlow` message: which tensors of a graph are parameter and result.

Tracing binds a typed parameter to placeholders and a result to tensors; loading
reads the same bindings back. A sequence is bound by the variant tensor of its
dataset, or, as newer TensorFlow Federated writes it, by its serialised graph.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import federated_language as fl
import tensorflow as tf
from federated_language.proto import computation_pb2
from tensorflow.python.framework import ops  # no public name

from ray_fed.language.structs import Struct, to_struct
from ray_fed.tensorflow.graphs import function_names, origins, python_functions
from ray_fed.tensorflow.graphs.protobufs import TensorFlowMessage
from ray_fed.tensorflow.tensors import datasets, specs

pb: Any = computation_pb2

Binding: TypeAlias = Any
"""A `pb.TensorFlow.Binding`."""


def stamp_parameter(type_spec: fl.Type, name: str = "arg") -> tuple[Any, Binding]:
    """Add placeholders for a parameter to the current graph.

    Args:
        type_spec: tensors, sequences, or structures of them.
        name: of the placeholders.

    Returns:
        The value a traced function sees (a Struct where the type is one), its binding.
    """
    match type_spec:
        case fl.TensorType():
            spec = specs.to_spec(type_spec)
            tensor = tf.compat.v1.placeholder(spec.dtype, spec.shape, name)
            return tensor, _tensor_binding(tensor)
        case fl.SequenceType():
            variant = tf.compat.v1.placeholder(tf.variant, [], name)
            dataset = datasets.from_variant(variant, type_spec.element)
            return dataset, _sequence_binding(variant)
        case fl.StructType():
            stamped = [
                (element_name, stamp_parameter(element, f"{name}_{index}"))
                for index, (element_name, element) in enumerate(type_spec.items())
            ]
            value = Struct(
                (element_name, member) for element_name, (member, _) in stamped
            )
            return value, _struct_binding(binding for _, (_, binding) in stamped)
        case _:
            raise TypeError(
                "Expected a parameter made of tensors, sequences and structures,"
                f" found `{type_spec}`."
            )


def bind_result(
    value: Any, type_spec: fl.Type, mark: Callable[[Any], Any] = tf.identity
) -> Binding:
    """Bind what a traced function returned to tensors of the current graph.

    Args:
        value: as the function returned it.
        type_spec: of `value`.
        mark: returns a tensor to bind in the place of one that was returned.
    """
    match type_spec:
        case fl.TensorType():
            return _tensor_binding(mark(tf.convert_to_tensor(value)))
        case fl.SequenceType():
            value = datasets.to_canonical(value, type_spec.element)
            return _sequence_binding(mark(tf.data.experimental.to_variant(value)))
        case fl.StructType():
            members = zip(type_spec.items(), to_struct(value), strict=True)
            return _struct_binding(
                bind_result(member, element, mark) for (_, element), member in members
            )
        case _:
            raise TypeError(
                "Expected a result made of tensors, sequences and structures, found"
                f" `{type_spec}`."
            )


def _tensor_binding(tensor: tf.Tensor) -> Binding:
    return pb.TensorFlow.Binding(
        tensor=pb.TensorFlow.TensorBinding(tensor_name=tensor.name)
    )


def _sequence_binding(variant: tf.Tensor) -> Binding:
    sequence = pb.TensorFlow.SequenceBinding(variant_tensor_name=variant.name)
    return pb.TensorFlow.Binding(sequence=sequence)


def _struct_binding(elements: Iterator[Binding]) -> Binding:
    return pb.TensorFlow.Binding(struct=pb.TensorFlow.StructBinding(element=elements))


def bound_names(binding: Binding) -> list[str]:
    """Return the names of the tensors of a binding, in the order of its type."""
    match binding.WhichOneof("binding"):
        case "tensor":
            return [binding.tensor.tensor_name]
        case "sequence":
            sequence = binding.sequence
            return [sequence.variant_tensor_name or sequence.graph_def_tensor_name]
        case "struct":
            return [
                name
                for element in binding.struct.element
                for name in bound_names(element)
            ]
        case _:
            return []


def to_bound(tensors: Sequence[tf.Tensor], binding: Binding) -> list[tf.Tensor]:
    """Return tensors as a binding takes them: some datasets as serialised graphs."""
    return [
        tensor if is_variant else tf.raw_ops.DatasetToGraphV2(input_dataset=tensor)
        for tensor, is_variant in zip(tensors, are_variants(binding), strict=True)
    ]


def from_bound(tensors: Sequence[tf.Tensor], binding: Binding) -> list[tf.Tensor]:
    """Return tensors that a binding gave, datasets as variants: undoes `to_bound`."""
    return [
        tensor if is_variant else tf.raw_ops.DatasetFromGraph(graph_def=tensor)
        for tensor, is_variant in zip(tensors, are_variants(binding), strict=True)
    ]


def are_variants(binding: Binding) -> list[bool]:
    """Return of each bound tensor whether it is no serialised graph of a dataset."""
    match binding.WhichOneof("binding"):
        case "struct":
            return [
                v for element in binding.struct.element for v in are_variants(element)
            ]
        case "sequence":
            return [not binding.sequence.graph_def_tensor_name]
        case "tensor":
            return [True]
        case _:
            return []


def build_message(
    graph: tf.Graph,
    parameter: Binding | None,
    result: Binding,
    initialize_op: str | None,
    fn: Callable[..., Any],
) -> Any:
    """Return a traced graph with its bindings as federated_language's message.

    Args:
        graph: that was traced.
        parameter: binding of the parameter, if there is one.
        result: binding of the result.
        initialize_op: the name of the op to run first on every call, if any.
        fn: that the graph was traced from, to be named in errors.
    """
    message = pb.TensorFlow(parameter=parameter, result=result)
    graph_def = graph.as_graph_def()
    _forget_gradients(graph_def)
    function_names.name_by_place(graph_def)
    origins.write(graph_def, fn)
    origins.write_places(graph_def, graph)
    python_functions.write_process(graph_def)
    message.graph_def.Pack(graph_def, deterministic=True)
    if initialize_op is not None:
        message.initialize_op = initialize_op
    return message


def _forget_gradients(graph_def: Any) -> None:
    """Take the gradients of `tf.custom_gradient` from TensorFlow's registry.

    It would keep them for ever, and with each of them the graph that was traced. That
    graph is complete, and no other can use its gradients: they take its tensors.
    """
    registry: Any = ops.gradient_registry
    registered = registry._registry  # noqa: SLF001 (its keys are taken by nothing else)
    for nodes in function_names.all_nodes(graph_def):
        for node in nodes:
            if "_gradient_op_type" in node.attr:
                name = node.attr["_gradient_op_type"].s.decode()
                if name.startswith("CustomGradient-"):
                    registered.pop(name, None)


def build_computation(message: TensorFlowMessage, type_spec: fl.FunctionType) -> Any:
    """Return a computation that is the message, of the type."""
    return pb.Computation(type=type_spec.to_proto(), tensorflow=message)


def graph_of(message: TensorFlowMessage) -> Any:
    """Return the GraphDef inside a message, without what names its origin.

    Raises:
        UnsupportedError: it has Python functions of another process.
    """
    graph_def = _read_any(message)
    python_functions.check_process(graph_def)
    graph_def.ClearField("debug_info")
    return graph_def


def origin_of(message: TensorFlowMessage) -> str:
    """Return what an error calls the computation: its name and line, where known."""
    return origins.read(_read_any(message))


def find_place(message: TensorFlowMessage, text: str) -> str:
    """Return a sentence on the line that made the node an error's text names, or ""."""
    return origins.find_place(_read_any(message), text)


def check_portable(message: TensorFlowMessage) -> None:
    """Raise if a message cannot run in another process than the one that made it.

    Raises:
        UnsupportedError: it has Python functions.
    """
    python_functions.check_absent(_read_any(message))


def _read_any(message: TensorFlowMessage) -> Any:
    """Return the GraphDef that the message holds as a protobuf `Any`."""
    graph_def = tf.compat.v1.GraphDef()
    message.graph_def.Unpack(graph_def)
    return graph_def
