"""Builds a lowered graph of a message: placeholders, its body run, the rest cut off."""

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
from ray_fed.tensorflow.graphs.graph_message import GraphDef, TensorFlowMessage
from ray_fed.tensorflow.lowering.inlining import (
    CannotLower,
    Inliner,
    Serialised,
    Symbol,
    rename_functions,
    with_functions,
)
from ray_fed.tensorflow.lowering.sequences import Laid
from ray_fed.tensorflow.tensors import specs
from ray_fed.values import tensor_structures
from ray_fed.values.columnar_sequence import Sizes


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A graph with the names of its feeds, fetches and initialisation."""

    graph_def: GraphDef
    feeds: list[str]
    fetches: list[str]
    initialize_op: str | None


def leaf_types(type_spec: fl.Type | None) -> list[fl.Type]:
    """Return the tensors and sequences of a type, in order."""
    if isinstance(type_spec, fl.StructType):
        return [
            leaf for _, element in type_spec.items() for leaf in leaf_types(element)
        ]
    return [] if type_spec is None else [type_spec]


def fill_token(graph_def: GraphDef, name: str) -> None:
    """Make the session token of a graph, which nothing here reads, a constant."""
    for node in graph_def.node:
        if node.name == inlining.node_of(name):
            node.op = "Const"
            node.attr.clear()
            node.attr["dtype"].type = tf.string.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(b"", tf.string))


def rewrite(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    sizes: Sequence[Sizes | None] | None = None,
    *,
    unrolled: bool = False,
) -> Rewritten:
    """Return a message's graph without tf.data; the rest is as `lower` takes it.

    Raises:
        CannotLower: some of it has to stay.
    """
    if any(isinstance(t, fl.SequenceType) for t in leaf_types(type_spec.result)):
        raise CannotLower("sequence result")
    written = graph_message.graph_of(message)
    if message.session_token_tensor_name:
        fill_token(written, message.session_token_tensor_name)
    rename_functions(written)
    lowered = tf.Graph()
    with lowered.as_default(), tf.device(None):
        feeds, arguments = _stamp(message, type_spec.parameter, sizes)
        for value in arguments.values() if unrolled else ():
            sequence = value.sequence if isinstance(value, Serialised) else value
            if isinstance(sequence, Laid):
                sequence.unrolled = True
        results, last = _run(written, message, arguments, copies_all=any(sizes or ()))
        fetches = [tf.identity(result).name for result in results]
    initialize_op = last[0].name if last else None
    graph_def = lowered.as_graph_def()
    kept = [*feeds, *fetches, *([initialize_op] if initialize_op else [])]
    return Rewritten(
        with_functions(graph_def, written.library, kept), feeds, fetches, initialize_op
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
    if any(isinstance(result, Symbol) for result in results):
        raise CannotLower("a dataset as a tensor")
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
    leaves = zip(names, is_variant, leaf_types(parameter), strict=True)
    for index, (name, takes_variant, leaf) in enumerate(leaves):
        label = f"arg_{index}"
        known = None if sizes is None else sizes[index]
        match leaf:
            case fl.SequenceType():
                sequence, fed = (
                    _stamp_sequence(leaf.element, label)
                    if known is None
                    else _stamp_alike(leaf.element, label, known)
                )
                value = sequence if takes_variant else Serialised(sequence)
            case fl.TensorType():
                value = _placeholder(specs.to_spec(leaf), label)
                fed = [value]
            case _:
                raise CannotLower(f"a parameter of type {leaf}")
        arguments[name] = value
        feeds.extend(tensor.name for tensor in fed)
    return feeds, arguments


def _stamp_sequence(element: fl.Type, label: str) -> "tuple[Laid, list[tf.Tensor]]":
    columns: list[tuple[tf.Tensor, tf.Tensor | None]] = []
    fed: list[tf.Tensor] = []
    types = tensor_structures.flatten_type(element)
    for index, tensor_type in enumerate(types):
        spec = specs.to_spec(tensor_type)
        dims = spec.shape.dims
        if dims is None or None in spec.shape.as_list()[1:]:
            raise CannotLower("elements of unknown shape")
        has_splits = None in spec.shape.as_list()
        inner = spec.shape[1:] if has_splits else spec.shape
        shape = tf.TensorShape([None]).concatenate(inner)
        rows = _placeholder(tf.TensorSpec(shape, spec.dtype), f"{label}_{index}_rows")
        splits = None
        if has_splits:
            i64 = tf.TensorSpec([None], tf.int64)
            splits = _placeholder(i64, f"{label}_{index}_splits")
        bounds = None if splits is None else tf.expand_dims(splits, 1)
        columns.append((rows, bounds))
        fed.extend([rows] if splits is None else [rows, splits])
    length = _placeholder(tf.TensorSpec([], tf.int64), f"{label}_length")
    order = _component_order(element, len(columns))
    laid = Laid(
        [specs.to_spec(types[position]) for position in order],
        [columns[position] for position in order],
        length,
    )
    return laid, [*fed, length]


def _stamp_alike(
    element: fl.Type, label: str, sizes: Sizes
) -> "tuple[Laid, list[tf.Tensor]]":
    """Add placeholders of a sequence of which all sizes are known."""
    specs_: list[tf.TensorSpec] = []
    fed: list[tf.Tensor] = []
    pairs = zip(tensor_structures.flatten_type(element), sizes.batches, strict=True)
    for index, (tensor_type, batch) in enumerate(pairs):
        spec = specs.to_spec(tensor_type)
        shape = spec.shape if batch is None else [batch, *spec.shape.as_list()[1:]]
        specs_.append(tf.TensorSpec(shape, spec.dtype))
        stacked = tf.TensorSpec([sizes.length, *specs_[-1].shape], spec.dtype)
        fed.append(_placeholder(stacked, f"{label}_{index}_rows"))
    order = _component_order(element, len(fed))
    laid = Laid(
        [specs_[position] for position in order],
        [(fed[position], None) for position in order],
        tf.constant(sizes.length, tf.int64),
        sizes.length,
    )
    return laid, fed


def _component_order(element: fl.Type, num_columns: int) -> Sequence[int]:
    """Return, for each component of a dataset's element, its column."""
    packed = tensor_structures.unflatten(iter(range(num_columns)), element)
    return tf.nest.flatten(datasets.to_containers(packed, element, canonical=True))


def _placeholder(spec: tf.TensorSpec, name: str) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape, name)
