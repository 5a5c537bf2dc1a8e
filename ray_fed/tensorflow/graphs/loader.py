"""Loads serialized graphs, so that simultaneous calls do not affect one another.

Three parts of a graph are global to a process. They become local to a call:

* Library functions are global by name, and two processes may give one name to two
  functions. They are renamed by a hash of all functions of the graph.
* Variables and tables are global by shared name. They become anonymous: each call has
  its own, and frees them at its end.
* Initialization runs in each call. All other ops wait for it.

In a `LoadedGraph`, random numbers depend on a key alone, see `randomness`.

TensorFlow's arithmetic optimization is off for loaded graphs. It rewrites a + (b + c)
to (a + b) + c if it knows the three shapes. It knows more shapes in the graph of one
client than in a loop over many clients, so equal work would have other bits.

Some ops are not deterministic on a GPU. If TensorFlow's determinism is on, as on a
worker with a GPU, it refuses them there. Tracing would avoid them, but the driver that
traces has no determinism. So they are replaced when a graph is loaded:

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
from ray_fed.tensorflow.graphs import callbacks, frozen_weights
from ray_fed.tensorflow.graphs.graph_message import FunctionDef, GraphDef, NodeDef

_OFF = rewriter_config_pb2.RewriterConfig.OFF


def current() -> Any:
    """Return this thread's `FunctionCallOptions`, without arithmetic optimization."""
    eager: Any = context.context()
    options = eager.function_call_options
    return _in_order(options.config_proto_serialized, options.executor_type)


@contextlib.contextmanager
def used() -> Generator[None]:
    """Call graphs with the options that `current` returns, in the `with` block."""
    eager: Any = context.context()
    before = eager.function_call_options
    eager.function_call_options = current()
    try:
        yield
    finally:
        eager.function_call_options = before


@functools.lru_cache(maxsize=16)
def _in_order(serialized: bytes, executor_type: str | None) -> Any:
    config: Any = config_pb2.ConfigProto.FromString(serialized)
    rewrites = config.graph_options.rewrite_options
    rewrites.arithmetic_optimization = _OFF
    # These two only take time: 5.3 s instead of 2.2 s for 5,600 nodes (2026).
    rewrites.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrites.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    return context.FunctionCallOptions(executor_type, config)


_ANONYMOUS_NAME = b"cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""The `shared_name` by which TensorFlow gives each execution a variable of its own."""

_ANONYMOUS_TABLES = {
    "HashTable": "AnonymousHashTable",
    "HashTableV2": "AnonymousHashTable",
    "MutableHashTableV2": "AnonymousMutableHashTable",
    "MutableHashTableOfTensorsV2": "AnonymousMutableHashTableOfTensors",
    "MutableDenseHashTableV2": "AnonymousMutableDenseHashTable",
}
_SHARED_ATTRIBUTES = ("shared_name", "container", "use_node_name_sharing")
_UNORDERED_OPS = frozenset({"Placeholder", "Const", "Switch", "Merge"})
"""Ops without an effect, which may run before initialization."""


def isolate(graph_def: GraphDef, *first_ops: str | None) -> None:
    """Rewrite a GraphDef in place so that calls share no variables or tables.

    Each call runs the ops named in `first_ops`, in order, before all others.
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
            node.attr.pop(attribute, None)


def _run_first(graph_def: GraphDef, initialize_op: str) -> None:
    nodes = {node.name: node for node in graph_def.node}
    initialize_op = graph_message.node_of(initialize_op)
    closure = set(graph_message.reached(nodes, [initialize_op]))
    depths = _loop_depths(nodes)
    for name, node in nodes.items():
        # An edge into a frame of a v1 loop is illegal, so its Enter nodes wait.
        depth = depths.get(name, 0) - (node.op == "Enter")
        if name not in closure and node.op not in _UNORDERED_OPS and not depth:
            node.input.append(f"^{initialize_op}")


def _loop_depths(nodes: dict[str, NodeDef]) -> dict[str, int]:
    """Return the number of TensorFlow 1 loops around each node in such a loop."""
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
    """Return a result of `isolate` as a function from input tensors to result tensors.

    `feeds` and `fetches` are the names of these tensors, in order. Names in `fetches`
    can repeat.
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
    """Remove the functions `names` from TensorFlow's runtime when `wrapped` is freed.

    TensorFlow itself never removes the functions of a graph from the process. Each
    round with a new computation would leak memory.
    """
    if names:
        finalizer = weakref.finalize(wrapped, _free, context.context(), names)
        finalizer.atexit = False  # the process frees it all, and TensorFlow may be gone


def _free(eager_context: Any, names: list[str]) -> None:
    for name in names:
        eager_context.remove_function(name)


_OUTPUTS = ("loss", "backprop")


def use_deterministic_ops(graph_def: GraphDef) -> None:
    """If determinism is on, replace the ops of a GraphDef that lack it, in place.

    The results are equal up to rounding. A label that is not a class gives NaN, as in
    TensorFlow on a GPU.
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
    for result, name in list(function.ret.items()):
        function.ret[result] = renamed.get(name, name)


def _of_classes(features: Any, labels: Any) -> tuple[Any, Any]:
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
    loss = -tf.reduce_sum(labels * tf.nn.log_softmax(features), 1)
    return loss, tf.nn.softmax(features) - labels


_WRITTEN: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "SparseSoftmaxCrossEntropyWithLogits": _of_classes,
    "SoftmaxCrossEntropyWithLogits": _of_probabilities,
}


_Written: TypeAlias = tuple[list[NodeDef], list[str], list[str]]
"""The nodes that replace a node, and the names of their arguments and results."""


@functools.cache
def _trace(op: str, features: int, labels: int) -> tuple[_Written, _Written]:
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
    # The node stays, as an identity of the results, because others refer to its name.
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
        node.attr.pop(attribute, None)
    node.op = "IdentityN"
    node.input[:] = [*map(of, results), *waits]
    node.attr["T"].list.type.extend([dtype] * len(results))


@dataclasses.dataclass(frozen=True)
class Source:
    """The facts about a computation that its loaded graph needs.

    Attributes:
        origin: Name of the computation in errors.
        content: Hash of the original graph. The numbers of random ops depend on it.
        device: Name of the device, or None for TensorFlow's default.
        reads_later: Whether a result is a dataset, which is read after the call. In the
            meantime, another call may have set the states of random ops.
        find_place: Function from the message of an error to a sentence about the line
            of the user's code that the error is about, or "".
    """

    origin: str
    content: bytes
    device: str | None
    reads_later: bool
    find_place: Callable[[str], str]


class LoadedGraph:
    """One graph, which any thread can call with tensors any number of times.

    Args:
        graph_def: The graph, which is rewritten in place.
        feeds: Names of the tensors to pass, in order.
        fetches: Names of the tensors to return, in order.
        initialize_op: Name of the op that runs first in each call, or None.
        source: The computation of the graph.
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
        frozen = frozen_weights.take_out(graph_def)
        feeds = [*feeds, *(f"{name}:0" for name in frozen)]
        self._function: Callable[[list[tf.Tensor]], list[tf.Tensor]]
        with tf.device(source.device):
            self._frozen = frozen_weights.load(frozen.values())
            self._function = import_function(graph_def, feeds, list(fetches))
            self._states.create()
        self._notes = self._what_no_key_decides()
        self._one_at_a_time = (
            threading.Lock() if self._states.names else contextlib.nullcontext()
        )
        weakref.finalize(self, self._states.close)

    def _what_no_key_decides(self) -> list[diagnostics.Note]:
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
        """Run the graph on the tensors that `take` returns, and return its results.

        `take` is called on the graph's device, so that new tensors are there.
        """
        source = self._source
        with (
            self._one_at_a_time,
            tf.device(source.device),
            error_texts.naming_origin(source.origin, source.find_place),
        ):
            self._states.set(source.content)
            diagnostics.note(self._notes)
            frozen = [tensor for _, tensor in self._frozen]
            return callbacks.call(self._function, [*take(), *frozen])
