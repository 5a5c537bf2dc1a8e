"""Make a serialised graph safe to run many times, at once, beside any other.

Three things in a graph are global to a process, and are made local to a call:

* library functions, by name: renamed by a hash of all functions of the graph, as
  two processes give other bodies the same name;
* variables and tables, by shared name: made anonymous, so that each call has its
  own and frees it at its end;
* their initialisation: everything outside of the closure of `initialize_op` waits
  for it, so that each call starts afresh.

A `LoadedGraph` is one, from tensors to tensors, with its random numbers keyed.

TensorFlow runs loaded graphs in the order in which their sums were written. Its
arithmetic optimisation makes (a + b) + c of a + (b + c) where it knows the shapes
of all three. What it knows depends on the form of a graph: of the same work, more in a
graph of one client than in a loop over many. So the bits would depend on it, too.

Ops that TensorFlow refuses on a GPU, as their bits would differ by the run, are
replaced. TensorFlow's own Python functions write other ops if determinism is on as they
are traced. Graphs are traced in a driver, where it is off, and run on CPUs as they are.

    SparseSoftmaxCrossEntropyWithLogits    ->    softmaxes, sums and products, then
    SoftmaxCrossEntropyWithLogits                IdentityN(loss, backprop)
"""

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2  # no public names
from tensorflow.python.eager import context  # no public name
from tensorflow.python.framework import config  # no public name

import ray_fed.error_texts as error_texts
import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.randomness as randomness
from ray_fed.plan import diagnostics
from ray_fed.tensorflow.graphs import callbacks
from ray_fed.tensorflow.graphs.graph_message import FunctionDef, GraphDef, NodeDef

_OFF = rewriter_config_pb2.RewriterConfig.OFF


def current() -> Any:
    """Return TensorFlow's `FunctionCallOptions` for graphs called on this thread."""
    eager: Any = context.context()
    options = eager.function_call_options
    return _in_order(options.config_proto_serialized, options.executor_type)


@contextlib.contextmanager
def used() -> Generator[None]:
    """Have graphs called with these options inside, on this thread."""
    eager: Any = context.context()
    before = eager.function_call_options
    eager.function_call_options = current()
    try:
        yield
    finally:
        eager.function_call_options = before


@functools.lru_cache(maxsize=16)
def _in_order(serialised: bytes, executor_type: str | None) -> Any:
    config: Any = config_pb2.ConfigProto.FromString(serialised)
    rewrites = config.graph_options.rewrite_options
    rewrites.arithmetic_optimization = _OFF
    # What both would add is time: 5.3 s instead of 2.2 for 5,600 nodes (2026).
    rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    return context.FunctionCallOptions(executor_type, config)


_ANONYMOUS_NAME = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""What TensorFlow's kernels take as "a handle of its own for each execution"."""

_ANONYMOUS_TABLES = {
    "HashTable": "AnonymousHashTable",
    "HashTableV2": "AnonymousHashTable",
    "MutableHashTableV2": "AnonymousMutableHashTable",
    "MutableHashTableOfTensorsV2": "AnonymousMutableHashTableOfTensors",
    "MutableDenseHashTableV2": "AnonymousMutableDenseHashTable",
}
_SHARED_ATTRIBUTES = ("shared_name", "container", "use_node_name_sharing")
_UNORDERED_OPS = frozenset({"Placeholder", "Const", "Switch", "Merge"})
"""What has no effect and may run before initialisation."""


def isolate(graph_def: GraphDef, *first_ops: str | None) -> None:
    """Rewrite a GraphDef in place so that calls share nothing.

    Args:
        graph_def: as its message holds it.
        *first_ops: names of ops to run on every call before all others, in this order;
            None for none.
    """
    digest = graph_message.digest_library(graph_def)
    graph_message.rename_functions(graph_def, lambda name, _: f"{name}_{digest}")
    for nodes in graph_message.all_nodes(graph_def):
        for node in nodes:
            _make_anonymous(node)
    for first_op in first_ops:
        if first_op:
            _run_first(graph_def, first_op)


def _make_anonymous(node: NodeDef) -> None:
    if node.op == "VarHandleOp":
        if node.attr["shared_name"].s.startswith(randomness.KEPT_PREFIX):
            return
        node.attr["shared_name"].s = _ANONYMOUS_NAME
    elif node.op in _ANONYMOUS_TABLES:
        node.op = _ANONYMOUS_TABLES[node.op]
        for attribute in _SHARED_ATTRIBUTES:
            if attribute in node.attr:
                del node.attr[attribute]


def _run_first(graph_def: GraphDef, initialize_op: str) -> None:
    nodes = {node.name: node for node in graph_def.node}
    initialize_op = graph_message.node_of(initialize_op)
    closure = set(graph_message.reached(nodes, [initialize_op]))
    depths = _loop_depths(nodes)
    for name, node in nodes.items():
        # An edge into a frame of a v1 loop is illegal: what enters the frame waits.
        depth = depths.get(name, 0) - (node.op == "Enter")
        if name not in closure and node.op not in _UNORDERED_OPS and not depth:
            node.input.append(f"^{initialize_op}")


def _loop_depths(nodes: dict[str, NodeDef]) -> dict[str, int]:
    """Return how many v1 loops are around each node that is in one."""
    consumers: dict[str, list[Any]] = {}
    for node in nodes.values():
        for source in node.input:
            name = graph_message.node_of(source)
            consumers.setdefault(name, []).append(node)
    pending = [node for node in nodes.values() if node.op == "Enter"]
    depths = {node.name: 1 for node in pending}
    while pending:
        node = pending.pop()
        outside = depths[node.name] - (node.op == "Exit")
        for consumer in consumers.get(node.name, []):
            depth = outside + (consumer.op == "Enter")
            if depth > depths.get(consumer.name, 0):
                depths[consumer.name] = depth
                pending.append(consumer)
    return depths


def import_function(graph_def: GraphDef, feeds: list[str], fetches: list[str]) -> Any:
    """Return an isolated graph as a function from feeds to fetches.

    Args:
        graph_def: after `isolate`.
        feeds: names of the tensors to pass, in order.
        fetches: names of the tensors to return, in order; one may stand twice.

    Returns:
        A callable that takes a list of tensors and returns a list of tensors.
    """

    def load() -> None:
        tf.graph_util.import_graph_def(graph_def, name="")

    names = [function.signature.name for function in graph_def.library.function]
    wrapped = tf.compat.v1.wrap_function(load, [])
    free_at_end(wrapped, names)
    graph = wrapped.graph
    pruned = wrapped.prune(
        [graph.as_graph_element(name) for name in feeds],
        [graph.as_graph_element(name) for name in fetches],
    )
    free_at_end(pruned, names)

    def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if not fetches:
            return []
        with used():
            return pruned._call_flat(tensors, pruned.captured_inputs)  # noqa: SLF001

    return run


def free_at_end(wrapped: Any, names: list[str]) -> None:
    """Free functions of the runtime with what calls them: of a graph, its library.

    TensorFlow adds the library to the process for each such function, counts by name,
    and takes nothing back: a round with a computation of its own would leak.
    """
    if names:
        finalizer = weakref.finalize(wrapped, _free, context.context(), names)
        finalizer.atexit = False  # the process frees it all, and TensorFlow may be gone


def _free(eager_context: Any, names: list[str]) -> None:
    for name in names:
        eager_context.remove_function(name)


_OUTPUTS = ("loss", "backprop")


def use_deterministic_ops(graph_def: GraphDef) -> None:
    """Rewrite a GraphDef in place, library functions included, where determinism is on.

    The results are the same up to rounding. A label that is none of the classes has
    NaNs, as by TensorFlow on a GPU.
    """
    if not config.is_op_determinism_enabled():
        return
    for node in list(graph_def.node):
        if node.op in _WRITTEN:
            _replace(node, graph_def.node, in_function=False)
    for function in graph_def.library.function:
        _replace_in(function)


def _replace_in(function: FunctionDef) -> None:
    renamed: dict[str, str] = {}
    for node in list(function.node_def):
        if node.op in _WRITTEN:
            _replace(node, function.node_def, in_function=True)
            for index, output in enumerate(_OUTPUTS):
                renamed[f"{node.name}:{output}:0"] = f"{node.name}:output:{index}"
    if not renamed:
        return
    for node in function.node_def:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for result, name in function.ret.items():
        function.ret[result] = renamed.get(name, name)


def _of_classes(features: Any, labels: Any) -> tuple[Any, Any]:
    """Return loss and backprop where one class is the label."""
    dtype = features.dtype
    nan = tf.constant(float("nan"), dtype)
    is_label = tf.one_hot(
        labels, tf.shape(features)[1], on_value=True, off_value=False, dtype=tf.bool
    )
    logs = tf.nn.log_softmax(features)
    loss = -tf.reduce_sum(tf.where(is_label, logs, tf.zeros([], dtype)), 1)
    backprop = tf.nn.softmax(features) - tf.cast(is_label, dtype)
    is_class = tf.reduce_any(is_label, 1)
    return (
        tf.where(is_class, loss, nan),
        tf.where(tf.expand_dims(is_class, 1), backprop, nan),
    )


def _of_probabilities(features: Any, labels: Any) -> tuple[Any, Any]:
    """Return loss and backprop where each class has a probability."""
    loss = -tf.reduce_sum(labels * tf.nn.log_softmax(features), 1)
    return loss, tf.nn.softmax(features) - labels


_WRITTEN: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "SparseSoftmaxCrossEntropyWithLogits": _of_classes,
    "SoftmaxCrossEntropyWithLogits": _of_probabilities,
}


_Written: TypeAlias = tuple[list[NodeDef], list[str], list[str]]
"""Nodes in place of one, the names of the two arguments, and of the two results."""


@functools.cache
def _trace(op: str, features: int, labels: int) -> tuple[_Written, _Written]:
    """Return the ops in place of one, for a graph and for a function."""
    rank = 1 if _WRITTEN[op] is _of_classes else 2
    specs = [
        tf.TensorSpec([None] * r, tf.as_dtype(d))
        for r, d in ((2, features), (rank, labels))
    ]
    with tf.init_scope(), tf.device(None):
        traced: Any = tf.function(_WRITTEN[op]).get_concrete_function(*specs)
    arguments = [tensor.op.name for tensor in traced.inputs]
    nodes = [n for n in traced.graph.as_graph_def().node if n.name not in arguments]
    results = [tensor.name.removesuffix(":0") for tensor in traced.outputs]
    written = traced.function_def
    in_function = (
        list(written.node_def),
        [argument.name for argument in written.signature.input_arg],
        [written.ret[result.name] for result in written.signature.output_arg],
    )
    return (nodes, arguments, results), in_function


def _replace(node: NodeDef, nodes: Any, *, in_function: bool) -> None:
    """Add the ops in place of a node, which then hands on what they come to."""
    types = node.attr["T"].type, node.attr.get("Tlabels", node.attr["T"]).type
    written, arguments, results = _trace(node.op, *types)[in_function]
    features, labels, *waits = node.input
    sources = dict(zip(arguments, (features, labels), strict=True))
    prefix = f"{node.name}/ray_fed_"

    def of(name: str) -> str:
        return sources[name] if name in sources else prefix + name

    for one in written:
        added = nodes.add()
        added.CopyFrom(one)
        added.name = prefix + one.name
        added.device = node.device
        added.input[:] = [of(name) for name in one.input]
    dtype = node.attr["T"].type
    for attribute in ("T", "Tlabels"):
        if attribute in node.attr:
            del node.attr[attribute]
    node.op = "IdentityN"
    node.input[:] = [*map(of, results), *waits]
    node.attr["T"].list.type.extend([dtype] * len(results))


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a graph comes from, whatever becomes of it.

    Attributes:
        origin: what an error calls the computation.
        content: the hash of what its graph does, as written; keys its random ops.
        device: name of the device to run on; None leaves it to TensorFlow.
        reads_later: its results are read after the call, when another may have set
            the states of random ops.
        find_place: returns a sentence on the line of the user's that made the node
            which an error's message names, or "".
    """

    origin: str
    content: bytes
    device: str | None
    reads_later: bool
    find_place: Callable[[str], str]


class LoadedGraph:
    """One graph, called with tensors any number of times, from any thread.

    Args:
        graph_def: to load; rewritten in place.
        feeds: names of the tensors to pass, in order.
        fetches: names of the tensors to return, in order.
        initialize_op: to run first on every call.
        source: where the graph comes from.
    """

    def __init__(
        self,
        graph_def: GraphDef,
        feeds: Sequence[str],
        fetches: Sequence[str],
        initialize_op: str | None,
        source: Source,
    ) -> None:
        self._source = source
        use_deterministic_ops(graph_def)
        self._states = randomness.key_random_ops(graph_def)
        isolate(graph_def, initialize_op)
        self._function: Callable[[list[tf.Tensor]], list[tf.Tensor]]
        with tf.device(source.device):
            self._function = import_function(graph_def, list(feeds), list(fetches))
            self._states.create()
        self._notes = self._what_no_key_decides()
        self._one_at_a_time = (
            threading.Lock() if self._states.names else contextlib.nullcontext()
        )
        weakref.finalize(self, self._states.close)

    def _what_no_key_decides(self) -> list[diagnostics.Note]:
        """Return what a call has to note, at most one."""
        ops = [*self._states.unkeyed]
        if self._source.reads_later:
            ops += self._states.in_functions
        if not ops:
            return []
        source = self._source
        return [
            diagnostics.RandomOpsUnkeyed(
                source.origin, source.content.hex()[:12], tuple(ops)
            )
        ]

    def __call__(self, take: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Return what the graph gives.

        Args:
            take: gives the tensors to pass, on the graph's device.
        """
        source = self._source
        with (
            self._one_at_a_time,
            tf.device(source.device),
            error_texts.naming_origin(source.origin, source.find_place),
        ):
            self._states.set(source.content)
            diagnostics.note(self._notes)
            return callbacks.call(self._function, take())
