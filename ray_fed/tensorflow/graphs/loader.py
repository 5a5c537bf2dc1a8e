"""Make a serialised graph safe to run many times, at once, beside any other.

Three things in a graph are global to a process, and are made local to a call:

* library functions, by name: renamed by a hash of all functions of the graph, as
  two processes give other bodies the same name;
* variables and tables, by shared name: made anonymous, so that each call has its
  own and frees it at its end;
* their initialisation: everything outside of the closure of `initialize_op` waits
  for it, so that each call starts afresh.

Has TensorFlow run loaded graphs in the order in which their sums were written.

Its arithmetic optimisation makes (a + b) + c of a + (b + c) where it knows the shapes
of all three. What it knows depends on the form of a graph: of the same work, more in a
graph of one client than in a loop over many. So the bits would depend on it, too.
"""

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Generator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2  # no public names
from tensorflow.python.eager import context  # no public name

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.tensorflow.graphs.graph_message import GraphDef, NodeDef

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

KEPT_PREFIX = b"ray_fed_state_"
"""Starts the shared names of variables that a caller sets between calls."""

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
    _rename_functions(graph_def)
    for nodes in graph_message.all_nodes(graph_def):
        for node in nodes:
            _make_anonymous(node)
    for first_op in first_ops:
        if first_op:
            _run_first(graph_def, first_op)


def _rename_functions(graph_def: GraphDef) -> None:
    library = graph_def.library
    if not library.function:
        return
    digest = hashlib.sha256(library.SerializeToString(deterministic=True)).hexdigest()
    names = {
        function.signature.name: f"{function.signature.name}_{digest[:16]}"
        for function in library.function
    }
    graph_message.rename(graph_def, names)


def _make_anonymous(node: NodeDef) -> None:
    if node.op == "VarHandleOp":
        if node.attr["shared_name"].s.startswith(KEPT_PREFIX):
            return
        node.attr["shared_name"].s = _ANONYMOUS_NAME
    elif node.op in _ANONYMOUS_TABLES:
        node.op = _ANONYMOUS_TABLES[node.op]
        for attribute in _SHARED_ATTRIBUTES:
            if attribute in node.attr:
                del node.attr[attribute]


def _run_first(graph_def: GraphDef, initialize_op: str) -> None:
    nodes = {node.name: node for node in graph_def.node}
    initialize_op = initialize_op.removeprefix("^")
    closure: set[str] = set()
    pending = [initialize_op]
    while pending:
        name = pending.pop()
        if name not in closure:
            closure.add(name)
            pending.extend(
                source.removeprefix("^").split(":")[0] for source in nodes[name].input
            )
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
            name = source.removeprefix("^").split(":")[0]
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
