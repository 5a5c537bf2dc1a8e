"""Functions of tensors as graphs of their own, and the loops in them.

Writes the loops of a graph as frames that enter once what no iteration changes.

TensorFlow writes them so, too, before it runs a graph; but it passes all that a loop
takes through three ops in each iteration, which counts where iterations are short.

    while i < n: i, x = i + 1, f(x, w)          w and n stay as they are

    i, x    Enter -> Merge -> Switch -> body -> NextIteration -> Merge ...
                                     -> Exit
    w, n    Enter, once

A node of a frame whose inputs all come from outside would also run in the iteration
that only finds that the loop has ended: such nodes wait for a variable that the
condition reads, so what nothing else reads, TensorFlow's own count of iterations, is
left out.

Arrays become tensors by one copy, where `tf.constant` copies large ones three times.
Where there is no GPU a tensor has the memory that an array was copied to. With one, and
for what numpy holds otherwise than TensorFlow (strings, bfloat16), TensorFlow copies.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import cancellation, context, execute  # no public names

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.lowering.inlining as inlining
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs.graph_message import FunctionDef, GraphDef, NodeDef
from ray_fed.values import read_limits

_LOOPS = frozenset({"While", "StatelessWhile"})


def write_frames(graph_def: GraphDef, kept: Sequence[str]) -> Any:
    """Return a graph that does the same, with frames for loops.

    Loops that TensorFlow would not write so are left, and so are those in functions
    that the graph calls.

    Args:
        graph_def: with its library.
        kept: names of tensors, none of them of a loop; what they do not need is
            left out.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    renamed: dict[str, str] = {}
    nodes: dict[str, NodeDef] = {}
    pending = collections.deque(graph_def.node)
    while pending:
        node = pending.popleft()
        frame = _frame_of(node, functions)
        if frame is None:
            nodes[node.name] = node
        else:
            pending.extend(frame.nodes)
            renamed.update(frame.renamed)
    framed = tf.compat.v1.GraphDef(versions=graph_def.versions)
    for node in nodes.values():
        sources = [_rewired(source, renamed) for source in node.input]
        del node.input[:]
        node.input.extend(sources)
    needed = set(graph_message.reached(nodes, map(graph_message.node_of, kept)))
    framed.node.extend(node for name, node in nodes.items() if name in needed)
    called = inlining.called_functions(framed.node, functions)
    framed.library.function.extend(functions[name] for name in called)
    return framed


def _frame_of(node: NodeDef, functions: Mapping[str, FunctionDef]) -> "_Frame | None":
    if node.op not in _LOOPS or not node.attr["_lower_using_switch_merge"].b:
        return None
    condition, body = (
        inlining.of_function(functions[node.attr[name].func.name])
        for name in ("cond", "body")
    )
    steady = [
        inlining.origin_of(body, result) == argument
        for argument, result in zip(body.arguments, body.results, strict=True)
    ]
    if all(steady):
        return None
    try:
        return _Frame(node, steady, _arguments_read(condition)).write(condition, body)
    except Fallback:  # a frame inside of a function
        return None


def _arguments_read(body: inlining.Body) -> set[int]:
    """Return the indices of the arguments that the results of a body are made of."""
    read = inlining.needed(body.nodes, map(graph_message.node_of, body.results))
    sources = {
        s for name in read for s in map(inlining.tensor_of, body.nodes[name].input)
    }
    sources.update(body.results)
    return {i for i, name in enumerate(body.arguments) if name in sources}


def _rewired(source: str, renamed: Mapping[str, str]) -> str:
    if source.startswith("^"):
        return renamed.get(source, source)
    return renamed.get(inlining.tensor_of(source), source)


class _Frame:
    """One loop as a frame.

    Args:
        loop: its node.
        steady: of each of its variables, whether no iteration changes it; not all.
        read: indices of those that its condition reads.

    Attributes:
        nodes: of the frame; copies, where they are of the loop's functions.
        renamed: what stands for the loop's tensors, and for a wait for it.
    """

    def __init__(self, loop: NodeDef, steady: list[bool], read: set[int]) -> None:
        self.nodes: list[Any] = []
        self.renamed: dict[str, str] = {}
        self._loop = loop
        self._types = loop.attr["T"].list.type
        self._steady = steady
        self._changing = [index for index, s in enumerate(steady) if not s]
        changing_read = (index for index in self._changing if index in read)
        self._pivot = next(changing_read, self._changing[0])
        self._outer: set[str] = set()

    def write(self, condition: inlining.Body, body: inlining.Body) -> "_Frame":
        """Add all nodes.

        Raises:
            Fallback: there are frames in a function of the loop.
        """
        sources = [source for source in self._loop.input if not source.startswith("^")]
        variables = self._enter(sources)
        switched = self._test(condition, variables)
        self._iterate(body, variables, switched)
        self._leave(sources, switched)
        return self

    def _enter(self, sources: Sequence[str]) -> list[str]:
        """Return the tensors of the variables in an iteration."""
        # No iteration begins before all inputs are there, though it may read one alone:
        # TensorFlow leaves out what a loop waits for where an input waits for it.
        waits = [f"^{graph_message.node_of(source)}" for source in self._loop.input]
        gate = self._add("NoOp", "enter", sorted(set(waits)))
        variables: list[str] = []
        for index, source in enumerate(sources):
            entering = [source] if self._steady[index] else [source, f"^{gate.name}"]
            enter = self._add("Enter", f"enter_{index}", entering, index)
            enter.attr["frame_name"].s = self._loop.name.encode()
            enter.attr["is_constant"].b = self._steady[index]
            parallel = self._loop.attr["parallel_iterations"].i
            enter.attr["parallel_iterations"].i = parallel or 10
            if self._steady[index]:
                self._outer.add(f"{enter.name}:0")
            else:
                back = f"{self._loop.name}/next_{index}"
                enter = self._add("Merge", f"merge_{index}", [enter.name, back], index)
                enter.attr["N"].i = 2
            variables.append(f"{enter.name}:0")
        return variables

    def _test(
        self, condition: inlining.Body, variables: Sequence[str]
    ) -> dict[int, str]:
        """Return the names of the switches of the variables that change."""
        pivot = variables[self._pivot]
        [goes_on], last = self._copy(condition, "cond", variables, pivot)
        sources = self._waiting([goes_on, *last], pivot)
        test = self._add("LoopCond", "goes_on", sources)
        return {
            index: self._add(
                "Switch", f"switch_{index}", [variables[index], test.name], index
            ).name
            for index in self._changing
        }

    def _iterate(
        self, body: inlining.Body, variables: Sequence[str], switched: Mapping[int, str]
    ) -> None:
        inside = list(variables)
        for index, switch in switched.items():
            node = self._add("Identity", f"body_{index}", [f"{switch}:1"], index)
            inside[index] = f"{node.name}:0"
        pivot = inside[self._pivot]
        results, last = self._copy(body, "body", inside, pivot)
        for index in self._changing:
            sources = self._waiting([results[index], *last], pivot)
            self._add("NextIteration", f"next_{index}", sources, index)

    def _leave(self, sources: Sequence[str], switched: Mapping[int, str]) -> None:
        name = self._loop.name
        for index, switch in switched.items():
            left = self._add("Exit", f"exit_{index}", [switch], index)
            self.renamed[f"{name}:{index}"] = f"{left.name}:0"
        done = f"^{name}/exit_{self._pivot}"
        self.renamed[f"^{name}"] = done
        for index, source in enumerate(sources):
            if self._steady[index]:
                left = self._add("Identity", f"left_{index}", [source, done], index)
                self.renamed[f"{name}:{index}"] = f"{left.name}:0"

    def _copy(
        self, body: inlining.Body, label: str, inside: Sequence[str], pivot: str
    ) -> tuple[list[str], list[str]]:
        """Add a function's nodes; return its results, and what waits for its effects.

        Args:
            body: of the function.
            label: of the names of the copies.
            inside: what stands for its arguments.
            pivot: a tensor that is not there in the iteration that ends the loop.
        """
        renamed = dict(zip(body.arguments, inside, strict=True))
        prefix = f"{self._loop.name}/{label}"
        roots = [*map(graph_message.node_of, body.results), *body.last]
        for name in inlining.needed(body.nodes, roots):
            node = type(self._loop)()
            node.CopyFrom(body.nodes[name])
            node.name = f"{prefix}/{name}"
            node.attr.pop("_class", None)  # colocated with what may be elsewhere
            sources = [_placed(source, renamed, prefix) for source in node.input]
            del node.input[:]
            # TensorFlow puts a function that is called here: its constants enter so.
            calls = any(graph_message.functions_of(node))
            node.input.extend(self._waiting(sources, pivot, always=calls))
            self.nodes.append(node)
        results = [_placed(result, renamed, prefix) for result in body.results]
        return results, [f"^{prefix}/{name}" for name in body.last]

    def _waiting(
        self, sources: list[str], pivot: str, *, always: bool = False
    ) -> list[str]:
        """Return a node's inputs, and a wait where all of them come from outside."""
        is_inside = any(s not in self._outer and not s.startswith("^") for s in sources)
        if is_inside and not always:
            return sources
        return [*sources, f"^{graph_message.node_of(pivot)}"]

    def _add(
        self, op: str, label: str, sources: Sequence[str], index: int | None = None
    ) -> Any:
        """Add a node; `index` is of the variable that it passes on."""
        node = type(self._loop)(name=f"{self._loop.name}/{label}", op=op)
        node.device = self._loop.device
        node.input.extend(sources)
        if index is not None:
            node.attr["T"].type = self._types[index]
        self.nodes.append(node)
        return node


def _placed(source: str, renamed: Mapping[str, str], prefix: str) -> str:
    """Return what an input of a function's node is in the graph."""
    if not source.startswith("^"):
        tensor = inlining.tensor_of(source)
        return renamed.get(tensor) or f"{prefix}/{tensor}"
    argument = renamed.get(f"{source[1:]}:0")
    return (
        f"^{graph_message.node_of(argument)}" if argument else f"^{prefix}/{source[1:]}"
    )


GraphFunction: TypeAlias = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""A graph, called as a function of its arguments in order."""


_NUMBERS = itertools.count()
"""Of the kernels of this process; no two functions of a runtime have one name."""

_HELD_BYTES = 16 * 2**20
"""Of results that no argument changes, which a graph computes once."""


def as_graph(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec]
) -> GraphFunction:
    """Return a function of tensors as a graph, with frames for loops."""
    graph = tf.Graph()
    with graph.as_default():
        fed = _placeholders(signature)
        fetched = [tf.identity(tensor) for tensor in function(*fed)]
    return _import(graph, fed, fetched, signature)


def as_pruned_graph(
    function: Callable[..., Sequence[tf.Tensor]], signature: Sequence[tf.TensorSpec]
) -> tuple[GraphFunction, list[int]]:
    """Return a function as a graph of those arguments that it reads, and which.

    What no argument changes is computed here, once, and what is an argument is passed
    on: a graph of nothing else is none at all.

    Args:
        function: of tensors; it draws nothing, and has no effects and no state but
            variables that it makes and sets before it reads them.
        signature: of its arguments.
    """
    graph = tf.Graph()
    with graph.as_default():
        fed = _placeholders(signature)
        results = [_without_identity(tensor) for tensor in function(*fed)]
        inside = [tf.identity(tensor) for tensor in results]
    places = {tensor.name: index for index, tensor in enumerate(fed)}
    reads = _arguments_of(graph, fed, results)
    # What no argument decides is computed now; it stays in the graph where large.
    fixed = [inside[index] for index, read in enumerate(reads) if not read]
    constants = iter(_import(graph, [], fixed, [])([]) if fixed else ())
    sources: list[int | tf.Tensor | None] = []
    for tensor, read in zip(results, reads, strict=True):
        value = None if read else next(constants)
        is_small = value is not None and value.dtype.size * tf.size(value) < _HELD_BYTES
        sources.append(value if is_small else places.get(tensor.name))
    computed = [index for index, source in enumerate(sources) if source is None]
    fetched = [inside[index] for index in computed]
    read = sorted(set[int]().union(*(reads[index] for index in computed)))
    run = _import(graph, [fed[i] for i in read], fetched, [signature[i] for i in read])
    passed = sorted({*read, *(source for source in sources if isinstance(source, int))})

    def call(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        by_index = dict(zip(passed, tensors, strict=True))
        ran = iter(run([by_index[index] for index in read]) if computed else ())
        return [
            next(ran)
            if source is None
            else (by_index[source] if isinstance(source, int) else source)
            for source in sources
        ]

    return call, passed


def _placeholders(signature: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in signature]


def _import(
    graph: tf.Graph,
    fed: Sequence[tf.Tensor],
    fetched: Sequence[tf.Tensor],
    signature: Sequence[tf.TensorSpec],
) -> GraphFunction:
    feeds, fetches = ([tensor.name for tensor in tensors] for tensors in (fed, fetched))
    graph_def = write_frames(graph.as_graph_def(), [*feeds, *fetches])
    return _load(_as_function(graph_def, feeds, signature, fetched), graph_def)


def _as_function(
    graph_def: GraphDef,
    feeds: Sequence[str],
    signature: Sequence[tf.TensorSpec],
    fetched: Sequence[tf.Tensor],
) -> FunctionDef:
    """Return the nodes of a graph as a function.

    TensorFlow can do it, by way of one more graph with an object of Python for each
    node, which takes ten times as long.
    """
    function = tf.compat.v1.GraphDef().library.function.add()
    function.signature.name = f"ray_fed_kernel_{next(_NUMBERS)}"
    # Sources as a function writes them: `node:name:0` where a graph has `node:0`.
    named: dict[str, str] = {}
    for index, (feed, spec) in enumerate(zip(feeds, signature, strict=True)):
        dtype = spec.dtype.as_datatype_enum
        argument = function.signature.input_arg.add(name=f"ray_fed_feed_{index}")
        argument.type = dtype
        shapes = function.arg_attr[index].attr["_output_shapes"].list.shape
        shapes.append(spec.shape.as_proto())
        named[feed] = argument.name
        named[f"^{graph_message.node_of(feed)}"] = f"^{argument.name}"
    for node in graph_def.node:
        if f"^{node.name}" not in named:
            function.node_def.append(node)
            for index, output in enumerate(inlining.output_names(node)):
                named[f"{node.name}:{index}"] = f"{node.name}:{output}"
    for node in function.node_def:
        sources = [
            named.get(source, source)
            if source.startswith("^")
            else named[inlining.tensor_of(source)]
            for source in node.input
        ]
        node.input[:] = sources
    for index, tensor in enumerate(fetched):
        result = function.signature.output_arg.add(name=f"result_{index}")
        result.type = tensor.dtype.as_datatype_enum
        function.ret[result.name] = named[tensor.name]
    function.signature.is_stateful = inlining.is_stateful(function)
    return function


def _load(function: FunctionDef, graph_def: GraphDef) -> GraphFunction:
    """Return a function, with the library of its graph, to be called eagerly.

    A call goes to the runtime at once, past what is done for gradients and for errors
    in words: 50 of 110 us of CPU for four sums (2026).
    """
    eager: Any = context.context()
    for each in [*graph_def.library.function, function]:
        eager.add_function_def(each)
    name, num_outputs = function.signature.name, len(function.signature.output_arg)
    attributes = tuple(itertools.chain(*loader.current().as_attrs().items()))

    def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        cancelled_by = cancellation.CancellationManager()
        with read_limits.interruptible(cancelled_by.start_cancel):
            return execute.execute_with_cancellation(
                name, num_outputs, tensors, attributes, eager, cancelled_by
            )

    names = [each.signature.name for each in graph_def.library.function]
    loader.free_at_end(run, [name, *names])
    return run


def _without_identity(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        (tensor,) = tensor.op.inputs
    return tensor


def _arguments_of(
    graph: tf.Graph, fed: Sequence[tf.Tensor], results: Sequence[tf.Tensor]
) -> list[list[int]]:
    """Return, for each result, the places of arguments that its value may depend on.

    Args:
        graph: of all tensors.
        fed: the arguments.
        results: of the graph.
    """
    masks: dict[Any, int] = {tensor.op: 1 << i for i, tensor in enumerate(fed)}
    before: dict[Any, int] | None = None
    while masks != before:  # twice, as ops follow their inputs, except in loops
        before = dict(masks)
        for op in graph.get_operations():
            mask = masks.get(op, 0)
            for source in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
                mask |= masks.get(source, 0)
            masks[op] = mask
    read = [masks[tensor.op] for tensor in results]
    return [[i for i in range(len(fed)) if mask >> i & 1] for mask in read]


def as_tensors(
    values: Iterable[Any], signature: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Return tensors, or arrays of the same types, as a graph takes them."""
    return [
        value if isinstance(value, tf.Tensor) else as_tensor(value, spec.dtype)
        for value, spec in zip(values, signature, strict=True)
    ]


def before(stop: tf.Tensor) -> Callable[..., tf.Tensor]:
    """Return the condition of a loop that counts to a number."""

    def is_before(index: tf.Tensor, *_: Any) -> tf.Tensor:
        return index < stop

    return is_before


_ALIGNMENT = 64
"""Bytes. TensorFlow's operations count on it, and nobody checks shared memory."""

_SHARED_KINDS = "biufc"
"""Kinds of numpy's dtypes that numpy and TensorFlow share."""


def as_tensor(array: Any, dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of what an array of its dtype, or a scalar, holds now."""
    if not _is_shared(dtype):
        return tf.constant(array, dtype)
    owned = _empty(np.shape(array), dtype)
    np.copyto(owned, array)
    return _share(owned)


def concatenate(arrays: Sequence[NDArray[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor with arrays of its dtype end to end; at least one."""
    if not _is_shared(dtype):
        return tf.constant(np.concatenate(arrays), dtype)
    length = sum(len(array) for array in arrays)
    owned = _empty((length, *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=owned)
    return _share(owned)


def stack(arrays: Sequence[NDArray[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor of arrays of its dtype and of one shape; at least one.

    Raises:
        ValueError: their shapes differ.
    """
    if not _is_shared(dtype):
        return tf.constant(np.stack(arrays), dtype)
    owned = _empty((len(arrays), *np.shape(arrays[0])), dtype)
    np.stack(arrays, out=owned)
    return _share(owned)


def count_bytes(tensor: tf.Tensor) -> int:
    """Return about how many bytes an eager tensor holds."""
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64)))
    num_elements = tensor.shape.num_elements() or 0  # no op, which takes long
    return num_elements * tensor.dtype.size


def _empty(shape: tuple[int, ...], dtype: tf.DType) -> NDArray[Any]:
    kind = np.dtype(dtype.as_numpy_dtype)
    size = math.prod(shape) * kind.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.__array_interface__["data"][0] % _ALIGNMENT
    return buffer[start : start + size].view(kind).reshape(shape)


def _share(owned: NDArray[Any]) -> tf.Tensor:
    return tf.experimental.dlpack.from_dlpack(owned.__dlpack__())


@functools.cache
def _is_shared(dtype: tf.DType) -> bool:
    is_known = np.dtype(dtype.as_numpy_dtype).kind in _SHARED_KINDS
    return is_known and not tf.config.list_logical_devices("GPU")
