"""Rewrites client work so that it runs without tf.data.

tf.data sets up its functions anew for each dataset that it iterates, which takes
longer than most of what clients do. Here the parameter's sequences come as tensors, in
the layouts of `ray_fed.values.columnar_sequence`, and loops over datasets become loops
over tensors:

    Reduce(Batch(parameter))    ->    while i < ceil(n / k): rows[i*k : (i+1)*k]

Results are the same bit for bit: the same functions run, on the same elements, in the
same order. Only what is drawn differs: the lowered graph has random ops of its own.
What matches no rule is left as it was written, and the reason said.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.lowering.passes as passes
import ray_fed.tensorflow.lowering.rules as rules
import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs.graph_message import GraphDef, TensorFlowMessage
from ray_fed.tensorflow.lowering.inlining import (
    Inliner,
    SerializedDataset,
    TracedValue,
    with_functions,
)
from ray_fed.tensorflow.lowering.sequences import InMemorySequence
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Sizes


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A graph without tf.data.

    Attributes:
        graph_def: with its library; as yet neither keyed nor isolated.
        feeds: names of tensors, in the order of the parameter type's leaves. For a
            tensor: one. For a sequence: for each column of its element type the rows
            and, where the layout has them, the splits i64[n + 1]; then, last, the
            number of elements, i64[].
        fetches: names of tensors, in the order of the result type's leaves.
        initialize_op: to run first on every call.
    """

    graph_def: GraphDef
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    initialize_op: str | None


def lower(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    sizes: Sequence[Sizes | None] | None = None,
    *,
    unrolled: bool = False,
) -> Lowered | Fallback:
    """Return the lowered graph of a computation, or why it runs as it was written.

    A computation without sequences lowers to itself.

    Args:
        message: a `pb.TensorFlow`.
        type_spec: of the computation.
        sizes: of each of the parameter's leaves that is a sequence, where known; such
            a sequence has neither splits nor a number of elements among the feeds, and
            its rows have the elements' dimension first, then the elements' own.
        unrolled: whether what is done with each element of such a sequence stands
            there once for each, without a loop.
    """
    types = type_spec.parameter, type_spec.result
    leaves = [leaf for part in types for leaf in graph_message.flat_types(part)]
    if not any(isinstance(leaf, fl.SequenceType) for leaf in leaves):
        return _itself(message, type_spec)
    try:
        return _rewrite(message, type_spec, sizes, unrolled=unrolled)
    except Fallback as fallback:
        return Fallback(fallback.reason)
    except Exception as error:  # noqa: BLE001 (no graph is refused for its lowering)
        return Fallback(f"{type(error).__name__}: {error}")


def _itself(message: TensorFlowMessage, type_spec: fl.FunctionType) -> Lowered:
    graph_def = graph_message.graph_of(message)
    feeds: list[str] = []
    if type_spec.parameter is not None:
        feeds = graph_message.bound_names(message.parameter)
    if message.session_token_tensor_name:
        _fill_token(graph_def, message.session_token_tensor_name)
    fetches = graph_message.bound_names(message.result)
    initialize_op = message.initialize_op or None
    return Lowered(graph_def, tuple(feeds), tuple(fetches), initialize_op)


def _fill_token(graph_def: GraphDef, name: str) -> None:
    """Make the session token of a graph, which nothing here reads, a constant."""
    for node in graph_def.node:
        if node.name == graph_message.node_of(name):
            node.op = "Const"
            node.attr.clear()
            node.attr["dtype"].type = tf.string.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(b"", tf.string))


def _rewrite(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    sizes: Sequence[Sizes | None] | None,
    *,
    unrolled: bool,
) -> Lowered:
    """Return a message's graph without tf.data; the rest is as `lower` takes it.

    Raises:
        Fallback: some of it has to stay.
    """
    results = graph_message.flat_types(type_spec.result)
    if any(isinstance(leaf, fl.SequenceType) for leaf in results):
        raise Fallback("sequence result")
    written = graph_message.graph_of(message)
    if message.session_token_tensor_name:
        _fill_token(written, message.session_token_tensor_name)
    # Names that no tracing here can give again.
    graph_message.rename_functions(written, lambda _, index: f"written_{index}")
    lowered = tf.Graph()
    with lowered.as_default(), tf.device(None):
        feeds, arguments = _stamp(message, type_spec.parameter, sizes)
        for value in arguments.values() if unrolled else ():
            sequence = value.sequence if isinstance(value, SerializedDataset) else value
            if isinstance(sequence, InMemorySequence):
                sequence.unrolled = True
        results, last = _run(written, message, arguments, copies_all=any(sizes or ()))
        fetches = [tf.identity(result).name for result in results]
    initialize_op = last[0].name if last else None
    graph_def = lowered.as_graph_def()
    kept = [*feeds, *fetches, *([initialize_op] if initialize_op else [])]
    return Lowered(
        with_functions(graph_def, written.library, kept),
        tuple(feeds),
        tuple(fetches),
        initialize_op,
    )


def _run(
    written: Any,
    message: TensorFlowMessage,
    arguments: Mapping[str, Any],
    *,
    copies_all: bool,
) -> Any:
    """Run the graph as it was written; return results and what initialises."""
    functions = {f.signature.name: f for f in written.library.function}
    data_rules = {**rules.PIPELINES, **passes.ITERATORS}
    inliner = Inliner(functions, data_rules, rules.CONTROL_FLOW, copies_all=copies_all)
    last = [message.initialize_op] if message.initialize_op else []
    names = graph_message.bound_names(message.result)
    body = inlining.of_graph(written, list(arguments), names, last)
    results, done = inliner.run(body, list(arguments.values()))
    if any(isinstance(result, TracedValue) for result in results):
        raise Fallback("a dataset as a tensor")
    return results, done


def _stamp(
    message: TensorFlowMessage,
    parameter: fl.Type | None,
    sizes: Sequence[Sizes | None] | None,
) -> "tuple[list[str], dict[str, Any]]":
    """Add placeholders; return their names, and what stands for each bound tensor."""
    feeds: list[str] = []
    arguments: dict[str, Any] = {}
    if parameter is None:
        return feeds, arguments
    names = graph_message.bound_names(message.parameter)
    is_variant = graph_message.are_variants(message.parameter)
    leaves = zip(names, is_variant, graph_message.flat_types(parameter), strict=True)
    for index, (name, takes_variant, leaf) in enumerate(leaves):
        label = f"arg_{index}"
        known = None if sizes is None else sizes[index]
        match leaf:
            case fl.SequenceType():
                sequence, fed = _stamp_sequence(leaf.element, label, known)
                value = sequence if takes_variant else SerializedDataset(sequence)
            case fl.TensorType():
                value = _placeholder(specs.to_spec(leaf), label)
                fed = [value]
            case _:
                raise Fallback(f"a parameter of type {leaf}")
        arguments[name] = value
        feeds.extend(tensor.name for tensor in fed)
    return feeds, arguments


def _stamp_sequence(
    element: fl.Type, label: str, sizes: Sizes | None
) -> "tuple[InMemorySequence, list[tf.Tensor]]":
    """Add placeholders of a sequence, of which all sizes may be known."""
    components: list[tf.TensorSpec] = []
    columns: list[tuple[tf.Tensor, tf.Tensor | None]] = []
    fed: list[tf.Tensor] = []
    types = tensor_structures.flatten_type(element)
    batches = [None] * len(types) if sizes is None else sizes.batches
    for index, (tensor_type, batch) in enumerate(zip(types, batches, strict=True)):
        spec, bounds = specs.to_spec(tensor_type), None
        if sizes is None:
            column = specs.column_spec(tensor_type)
            if column is None:
                raise Fallback("elements of unknown shape")
            rows_spec, has_splits = column
        else:
            shape = spec.shape if batch is None else [batch, *spec.shape.as_list()[1:]]
            spec = tf.TensorSpec(shape, spec.dtype)
            rows_spec = tf.TensorSpec([sizes.length, *spec.shape], spec.dtype)
            has_splits = False
        fed.append(_placeholder(rows_spec, f"{label}_{index}_rows"))
        rows = fed[-1]
        if has_splits:
            fed.append(_placeholder(specs.SPLITS, f"{label}_{index}_splits"))
            bounds = tf.expand_dims(fed[-1], 1)
        columns.append((rows, bounds))
        components.append(spec)
    if sizes is None:
        length = _placeholder(tf.TensorSpec([], tf.int64), f"{label}_length")
        fed.append(length)
    else:
        length = tf.constant(sizes.length, tf.int64)
    # A dataset has its components in another order than the type has columns.
    packed = tensor_structures.unflatten(iter(range(len(columns))), element)
    order = tf.nest.flatten(datasets.to_containers(packed, element, canonical=True))
    sequence = InMemorySequence(
        [components[position] for position in order],
        [columns[position] for position in order],
        length,
        None if sizes is None else sizes.length,
    )
    return sequence, fed


def _placeholder(spec: tf.TensorSpec, name: str) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape, name)
