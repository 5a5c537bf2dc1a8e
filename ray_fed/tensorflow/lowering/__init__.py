"""Rewrites a computation so that it runs without tf.data: it *lowers* the computation.

tf.data prepares its functions again for each dataset that it iterates over, which takes
longer than most client work. Here, the sequences in an argument become tensors, in the
layouts of `ray_fed.values.columnar_sequence`, and loops over datasets become loops over
tensors:

    Reduce(Batch(parameter))    ->    while i < ceil(n / k): rows[i*k : (i+1)*k]

The bits are the same, because the same functions run on the same elements in the same
order. Only random numbers differ, because the lowered graph has random ops of its own.
A graph with an op that has no rule is not lowered. docs/lowering.md explains more.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import federated_language as fl
import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.randomness as randomness
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.lowering.passes as passes
import ray_fed.tensorflow.lowering.rules as rules
import ray_fed.tensorflow.lowering.variables as variables
import ray_fed.tensorflow.tensors.datasets as datasets
from ray_fed.language import trees
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
        graph_def: The graph with its library. Random ops do not have keys yet.
        feeds: Names of the tensors to pass, in the order of the parameter's type. For a
            sequence, these are the rows of each column, followed by its splits,
            i64[n + 1], if the layout has them, and then the number of elements, i64[].
        fetches: Names of the tensors to return, in the order of the result's type.
        initialize_op: Name of the op to run first in every call, or None.
        kept_variables: The reason why variables did not become values, or None.
        passed: Name of a tensor that says whether all checks passed, bool[]. None if
            the graph raises an error for a failed check.
    """

    graph_def: GraphDef
    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    initialize_op: str | None
    kept_variables: str | None = None
    passed: str | None = None


def lower(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    sizes: Sequence[Sizes | None] | None = None,
    *,
    unrolled: bool = False,
    isolated: bool = True,
) -> Lowered | Fallback:
    """Return a computation as a graph without tf.data, or the reason for having none.

    Variables that the computation creates become values, see `variables`. If one of
    them cannot become a value, all variables stay variables. A graph without sequences
    and variables is returned unchanged.

    Args:
        message: The computation, a `pb.TensorFlow`.
        type_spec: Type of the computation.
        sizes: For each tensor and sequence of the parameter, the sizes of a sequence if
            they are known. The sequence then has no splits and no number of elements,
            and the first dimension of its rows is the element.
        unrolled: Whether to unroll loops over sequences of known sizes.
        isolated: Whether results must have the bits of the original graph. Otherwise
            TensorFlow can rewrite arithmetic across variables, and checks become
            values, see `Lowered.passed`.
    """
    types = type_spec.parameter, type_spec.result
    leaves = [leaf for part in types for leaf in trees.leaf_types(part)]
    has_sequences = any(isinstance(leaf, fl.SequenceType) for leaf in leaves)
    opaque = _opaque if isolated else _same
    kinds = {"VarHandleOp"} if isolated else {"VarHandleOp", "Assert"}
    # First try with variables as values. If one of them cannot be a value, try without.
    ways = [opaque] if _has_values(message, kinds, has_sequences=has_sequences) else []
    reasons: list[str] = []
    for way in [*ways, None] if has_sequences else ways:
        try:
            lowered = _rewrite(message, type_spec, sizes, unrolled=unrolled, opaque=way)
        except Fallback as fallback:
            reasons.append(fallback.reason)
        except Exception as error:  # noqa: BLE001 (no graph is refused for its lowering)
            reasons.append(f"{type(error).__name__}: {error}")
        else:
            break
    else:
        if has_sequences:
            return Fallback(reasons[-1])
        lowered = _itself(message, type_spec)
    return dataclasses.replace(lowered, kept_variables=reasons[0] if reasons else None)


def _has_values(
    message: TensorFlowMessage, kinds: AbstractSet[str], *, has_sequences: bool
) -> bool:
    # Executors and kernels must number random ops alike. So a computation without
    # sequences is not lowered if it draws.
    nodes = graph_message.all_nodes(graph_message.graph_of(message))
    ops = {node.op for listed in nodes for node in listed}
    draws = any(map(randomness.draws, ops))
    return bool(kinds & ops) and (has_sequences or not draws)


def _opaque(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)


def _same(tensor: tf.Tensor) -> tf.Tensor:
    return tensor


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
    for node in graph_def.node:
        if node.name == graph_message.node_of(name):
            graph_message.make_constant(node, value=b"", dtype=tf.string)


def _rewrite(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    sizes: Sequence[Sizes | None] | None,
    *,
    unrolled: bool,
    opaque: Callable[[tf.Tensor], tf.Tensor] | None,
) -> Lowered:
    # `opaque` hides the value of a variable from TensorFlow's optimizer. With None,
    # variables do not become values.
    results = trees.leaf_types(type_spec.result)
    if any(isinstance(leaf, fl.SequenceType) for leaf in results):
        raise Fallback("sequence result")
    written = graph_message.graph_of(message)
    if message.session_token_tensor_name:
        _fill_token(written, message.session_token_tensor_name)
    # These names are different from all names that tracing makes here.
    graph_message.rename_functions(written, lambda _, index: f"written_{index}")
    lowered = tf.Graph()
    with lowered.as_default(), tf.device(None):
        feeds, arguments = _stamp(message, type_spec.parameter, sizes)
        for value in arguments.values() if unrolled else ():
            sequence = value.sequence if isinstance(value, SerializedDataset) else value
            if isinstance(sequence, InMemorySequence):
                sequence.unrolled = True
        # Static shapes are lost in a called function, so its nodes are copied.
        copies_all = any(sizes or ())
        checks = [variables.Passed()] if opaque is _same else []
        results, last = _run(
            written, message, arguments, opaque, checks, copies_all=copies_all
        )
        fetches = [tf.identity(result).name for result in results]
        passed = [tf.identity(check.read()).name for check in checks if check.changed]
    initialize_op = last[0].name if last else None
    graph_def = lowered.as_graph_def()
    kept = [*feeds, *fetches, *passed, *([initialize_op] if initialize_op else [])]
    return Lowered(
        with_functions(graph_def, written.library, kept),
        tuple(feeds),
        tuple(fetches),
        initialize_op,
        passed=passed[0] if passed else None,
    )


def _run(
    written: Any,
    message: TensorFlowMessage,
    arguments: Mapping[str, Any],
    opaque: Callable[[tf.Tensor], tf.Tensor] | None,
    checks: Sequence[variables.Passed],
    *,
    copies_all: bool,
) -> Any:
    functions = {f.signature.name: f for f in written.library.function}
    data_rules = {**rules.PIPELINES, **passes.ITERATORS}
    if opaque is None:
        inliner = Inliner(
            functions, data_rules, rules.CONTROL_FLOW, copies_all=copies_all
        )
    else:
        created = {**variables.CREATED, **(variables.CHECKS if checks else {})}
        inliner = Inliner(
            functions,
            {**data_rules, **created},
            {**rules.CONTROL_FLOW, **variables.USED},
            value_ops=created.keys() | variables.USED.keys(),
            opaque=opaque,
            copies_all=copies_all,
        )
    last = [message.initialize_op] if message.initialize_op else []
    names = graph_message.bound_names(message.result)
    body = inlining.of_graph(written, list(arguments), names, last)
    if opaque is not None:
        if inliner.draws_first(body):
            raise Fallback("a variable whose initial value is random")
        # A call initializes all variables before it reads one.
        body = dataclasses.replace(body, first=body.last)
    with inliner.carrying(checks):
        results, done = inliner.run(body, list(arguments.values()))
    if any(isinstance(result, TracedValue) for result in results):
        raise Fallback("a dataset as a tensor")
    return results, done


def _stamp(
    message: TensorFlowMessage,
    parameter: fl.Type | None,
    sizes: Sequence[Sizes | None] | None,
) -> "tuple[list[str], dict[str, Any]]":
    feeds: list[str] = []
    arguments: dict[str, Any] = {}
    if parameter is None:
        return feeds, arguments
    names = graph_message.bound_names(message.parameter)
    is_variant = graph_message.are_variants(message.parameter)
    leaves = zip(names, is_variant, trees.leaf_types(parameter), strict=True)
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
    # The components of a dataset are in another order than the columns of the type.
    packed = trees.unflatten(iter(range(len(columns))), element)
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
