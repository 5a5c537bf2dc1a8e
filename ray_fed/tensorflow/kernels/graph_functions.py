"""Makes TensorFlow graphs of functions of tensors, to call with little overhead.

`as_graph` traces and loads a function. `as_pruned_graph` also leaves out arguments that
the function does not read, and results that are constant. A *frame* is TensorFlow's
low-level form of a loop: ops such as Enter, Merge, Switch and Exit.
"""

import base64
import collections
import copy
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.eager import cancellation, context, execute  # no public names

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.kept_graphs as kept_graphs
import ray_fed.tensorflow.graphs.loader as loader
import ray_fed.tensorflow.lowering.inlining as inlining
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs import frozen_weights
from ray_fed.tensorflow.graphs.graph_message import FunctionDef, GraphDef, NodeDef
from ray_fed.values import frozen_arrays, read_limits

_LOOPS = frozenset({"While", "StatelessWhile"})

_LOOK_S = 0.1
"""Seconds between two checks of a waiting call whether its caller still waits."""


def write_frames(graph_def: GraphDef, kept: Sequence[str]) -> Any:
    """Return an equivalent graph whose loops are written as frames.

    TensorFlow also writes loops as frames before it runs a graph, but passes every
    input of a loop through three ops in each iteration. Here, inputs that do not change
    enter the loop once:

        while i < n: i, x = i + 1, f(x, w)          w and n do not change

        i, x    Enter -> Merge -> Switch -> body -> NextIteration -> Merge ...
    -> Exit     w, n    Enter, once

    Nodes that no tensor of `kept` depends on are removed. Loops in library functions
    are not changed, nor are loops that TensorFlow does not write as frames.
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
    except Fallback:  # a function of the loop has a frame
        return None


def _arguments_read(body: inlining.Body) -> set[int]:
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
        loop: The node of the loop.
        steady: For each loop variable, whether it never changes. Not all are true.
        read: Indices of the variables that the condition reads.

    Attributes:
        nodes: The nodes of the frame. Nodes of the loop's functions are copied.
        renamed: New names of the loop's outputs, and of the node as a control input.
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
        sources = [source for source in self._loop.input if not source.startswith("^")]
        variables = self._enter(sources)
        switched = self._test(condition, variables)
        self._iterate(body, variables, switched)
        self._leave(sources, switched)
        return self

    def _enter(self, sources: Sequence[str]) -> list[str]:
        # An iteration must begin after all inputs are computed, even those that it does
        # not read: TensorFlow removes control inputs that an input implies.
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
        renamed = dict(zip(body.arguments, inside, strict=True))
        prefix = f"{self._loop.name}/{label}"
        roots = [*map(graph_message.node_of, body.results), *body.last]
        for name in inlining.needed(body.nodes, roots):
            node = type(self._loop)()
            node.CopyFrom(body.nodes[name])
            node.name = f"{prefix}/{name}"
            node.attr.pop("_class", None)  # colocation, which refers to old names
            sources = [_placed(source, renamed, prefix) for source in node.input]
            del node.input[:]
            # TensorFlow inlines a called function, whose constants need the wait, too.
            calls = any(graph_message.functions_of(node))
            node.input.extend(self._waiting(sources, pivot, always=calls))
            self.nodes.append(node)
        results = [_placed(result, renamed, prefix) for result in body.results]
        return results, [f"^{prefix}/{name}" for name in body.last]

    def _waiting(
        self, sources: list[str], pivot: str, *, always: bool = False
    ) -> list[str]:
        # A node whose inputs all come from outside the frame would run once too often,
        # when the condition is false. So it waits for the tensor `pivot`, which does
        # not exist then.
        is_inside = any(s not in self._outer and not s.startswith("^") for s in sources)
        if is_inside and not always:
            return sources
        return [*sources, f"^{graph_message.node_of(pivot)}"]

    def _add(
        self, op: str, label: str, sources: Sequence[str], index: int | None = None
    ) -> Any:
        node = type(self._loop)(name=f"{self._loop.name}/{label}", op=op)
        node.device = self._loop.device
        node.input.extend(sources)
        if index is not None:
            node.attr["T"].type = self._types[index]
        self.nodes.append(node)
        return node


def _placed(source: str, renamed: Mapping[str, str], prefix: str) -> str:
    if not source.startswith("^"):
        tensor = inlining.tensor_of(source)
        return renamed.get(tensor) or f"{prefix}/{tensor}"
    argument = renamed.get(f"{source[1:]}:0")
    return (
        f"^{graph_message.node_of(argument)}" if argument else f"^{prefix}/{source[1:]}"
    )


GraphFunction: TypeAlias = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""A graph as a function of its arguments, in order."""


_NUMBERS = itertools.count()
"""Counter for unique names of functions in TensorFlow's runtime."""

_HELD_BYTES = 16 * 2**20
"""Maximum bytes of a constant result that is computed once and kept."""


class NumberedGraph:
    """A graph with inputs for the numbers of an algorithm, such as a learning rate.

    `ray_fed.tensorflow.graphs.numbers` explains these numbers.
    """

    def __init__(self, device: str | None) -> None:
        self._device = device
        with tf.device(device):
            self._numbers = tf.zeros([0], tf.float64)

    def with_numbers(self, numbers: Sequence[float]) -> Self:
        """Return this graph with these values of its numbers. Both share the graph."""
        if not numbers:
            return self
        bound = copy.copy(self)
        with tf.device(self._device):
            tensor = tf.constant(numbers, tf.float64, [len(numbers)])
        vars(bound)["_numbers"] = tensor
        return bound


class KeptState(Protocol):
    """An object that records facts while a graph is built, to cache them with it."""

    def save(self) -> Any:
        """Return the facts as a JSON value, or None if the graph cannot be cached."""
        ...

    def restore(self, saved: Any) -> None:
        """Set the facts that `save` returned, when the graph comes from the cache."""
        ...


def as_graph(
    function: Callable[..., Sequence[tf.Tensor]],
    signature: Sequence[tf.TensorSpec],
    key: str | None = None,
    state: KeptState | None = None,
) -> GraphFunction:
    """Return a function of tensors as a loaded graph.

    Args:
        function: Function that adds ops to the current graph and returns its results.
        signature: Specs of the arguments.
        key: Key of the graph in `kept_graphs`, or None to build the graph each time.
        state: The object that records facts while `function` runs, or None.
    """
    if key is not None and (kept := kept_graphs.find(key)) is not None:
        saved, content = kept
        if state is not None:
            state.restore(saved)
        return _load(tf.compat.v1.GraphDef.FromString(content))
    graph = tf.Graph()
    with graph.as_default():
        fed = _placeholders(signature)
        fetched = [tf.identity(tensor) for tensor in function(*fed)]
    written = _write(graph, fed, fetched, signature)
    saved = () if state is None else state.save()
    if key is not None and saved is not None:
        kept_graphs.put(key, saved, written.SerializeToString(deterministic=True))
    return _load(written)


def as_pruned_graph(
    function: Callable[..., Sequence[tf.Tensor]],
    signature: Sequence[tf.TensorSpec],
    key: str | None = None,
) -> tuple[GraphFunction, list[int]]:
    """Return a function as a graph of the arguments that it reads, and their indices.

    Small results that depend on no argument are computed here, once. Results that are
    arguments do not go through the graph. `function` must have no random numbers, state
    or effects. The arguments are as in `as_graph`.
    """
    kept = None if key is None else kept_graphs.find(key)
    if kept is None:
        graph = tf.Graph()
        with graph.as_default():
            fed = _placeholders(signature)
            results = [_without_identity(tensor) for tensor in function(*fed)]
            inside = [tf.identity(tensor) for tensor in results]
        # A result that is an argument is found by the name of its placeholder.
        places = {tensor.name: index for index, tensor in enumerate(fed)}
        reads = _arguments_of(graph, fed, results)
        # Compute constant results now. Large ones stay in the graph.
        fixed = [inside[index] for index, read in enumerate(reads) if not read]
        computed_now = _load(_write(graph, [], fixed, []))([]) if fixed else []
        constants = iter(computed_now)
        # A source is the index of an argument, a constant, or None for the graph.
        sources: list[int | tf.Tensor | None] = []
        for tensor, read in zip(results, reads, strict=True):
            value = None if read else next(constants)
            is_small = (
                value is not None and value.dtype.size * tf.size(value) < _HELD_BYTES
            )
            sources.append(value if is_small else places.get(tensor.name))
        computed = [index for index, source in enumerate(sources) if source is None]
        fetched = [inside[index] for index in computed]
        read = sorted(set[int]().union(*(reads[index] for index in computed)))
        written = _write(
            graph, [fed[i] for i in read], fetched, [signature[i] for i in read]
        )
        if key is not None:
            saved = [read, list(map(_save_source, sources))]
            kept_graphs.put(key, saved, written.SerializeToString(deterministic=True))
    else:
        (read, saved_sources), content = kept
        sources = list(map(_restore_source, saved_sources))
        written = tf.compat.v1.GraphDef.FromString(content)
    run = _load(written)
    is_needed = any(source is None for source in sources)
    passed = sorted({*read, *(source for source in sources if isinstance(source, int))})

    def call(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        by_index = dict(zip(passed, tensors, strict=True))
        # The graph returns only computed results, so they fill the remaining places.
        ran = iter(run([by_index[index] for index in read]) if is_needed else ())
        return [
            next(ran)
            if source is None
            else (by_index[source] if isinstance(source, int) else source)
            for source in sources
        ]

    return call, passed


def _save_source(source: int | tf.Tensor | None) -> Any:
    if not isinstance(source, tf.Tensor):
        return source
    content = tf.io.serialize_tensor(source).numpy()
    return base64.b64encode(content).decode(), source.dtype.name


def _restore_source(saved: Any) -> int | tf.Tensor | None:
    if not isinstance(saved, list):
        return saved
    content, dtype = cast("list[str]", saved)
    return tf.io.parse_tensor(base64.b64decode(content), tf.as_dtype(dtype))


def _placeholders(signature: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in signature]


def _write(
    graph: tf.Graph,
    fed: Sequence[tf.Tensor],
    fetched: Sequence[tf.Tensor],
    signature: Sequence[tf.TensorSpec],
) -> GraphDef:
    feeds, fetches = ([tensor.name for tensor in tensors] for tensors in (fed, fetched))
    graph_def = write_frames(graph.as_graph_def(), [*feeds, *fetches])
    function = _as_function(graph_def, feeds, signature, fetched)
    written = tf.compat.v1.GraphDef(library=graph_def.library)
    written.library.function.append(function)
    return written


def _as_function(
    graph_def: GraphDef,
    feeds: Sequence[str],
    signature: Sequence[tf.TensorSpec],
    fetched: Sequence[tf.Tensor],
) -> FunctionDef:
    # TensorFlow's own conversion of a graph to a function takes ten times as long,
    # because it creates a Python object for each node. Frozen arrays are the last
    # arguments of the function.
    function = tf.compat.v1.GraphDef().library.function.add()
    function.signature.name = "ray_fed_kernel"
    # Inputs are named `node:0` in a graph and `node:name:0` in a function.
    named: dict[str, str] = {}
    for index, (feed, spec) in enumerate(zip(feeds, signature, strict=True)):
        dtype = spec.dtype.as_datatype_enum
        argument = function.signature.input_arg.add(name=f"ray_fed_feed_{index}")
        argument.type = dtype
        shapes = function.arg_attr[index].attr["_output_shapes"].list.shape
        shapes.append(spec.shape.as_proto())
        named[feed] = argument.name
        named[f"^{graph_message.node_of(feed)}"] = f"^{argument.name}"
    arrays = frozen_weights.take_out(graph_def)
    for name, (array, dtype, shape) in arrays.items():
        if f"^{array}" not in named.values():
            argument = function.signature.input_arg.add(name=array)
            argument.type = dtype.as_datatype_enum
            index = len(function.signature.input_arg) - 1
            shapes = function.arg_attr[index].attr["_output_shapes"].list.shape
            shapes.append(shape.as_proto())
        named[f"{name}:0"], named[f"^{name}"] = array, f"^{array}"
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


def _arrays_of(function: FunctionDef) -> Iterator[tuple[str, tf.DType, Any]]:
    for index, argument in enumerate(function.signature.input_arg):
        if argument.name.startswith(frozen_arrays.PREFIX):
            (shape,) = function.arg_attr[index].attr["_output_shapes"].list.shape
            yield argument.name, tf.as_dtype(argument.type), tf.TensorShape(shape)


def _load(written: GraphDef) -> GraphFunction:
    number = next(_NUMBERS)  # names are unique in TensorFlow's runtime
    graph_message.rename_functions(written, lambda name, _: f"{name}_{number}")
    eager: Any = context.context()
    for each in written.library.function:
        eager.add_function_def(each)
    function = written.library.function[-1]
    name, num_outputs = function.signature.name, len(function.signature.output_arg)
    frozen = frozen_weights.load(_arrays_of(function))
    attributes = tuple(itertools.chain(*loader.current().as_attrs().items()))

    # Calling `execute` directly leaves out TensorFlow's code for gradients and error
    # messages, which takes 50 of 110 us of CPU for four sums (2026).
    def execute_now(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        cancelled_by = cancellation.CancellationManager()
        with read_limits.interruptible(cancelled_by.start_cancel):
            return execute.execute_with_cancellation(
                name,
                num_outputs,
                [*tensors, *(tensor for _, tensor in frozen)],
                attributes,
                eager,
                cancelled_by,
            )

    # TensorFlow optimizes a function in its first call, and again in each call that
    # begins meanwhile: seconds of CPU time in each thread for thousands of nodes.
    # Python functions may wait for functions of another call.
    first, is_optimized = threading.RLock(), threading.Event()
    if graph_message.has_python_functions(written):
        is_optimized.set()

    def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if is_optimized.is_set():
            return execute_now(tensors)
        while not first.acquire(timeout=_LOOK_S):
            read_limits.check()
        try:
            if not is_optimized.is_set():
                results = execute_now(tensors)
                is_optimized.set()
                return results
        finally:
            first.release()
        return execute_now(tensors)

    names = [each.signature.name for each in written.library.function]
    loader.free_at_end(run, [name, *names[:-1]])
    return run


def _without_identity(tensor: tf.Tensor) -> tf.Tensor:
    passing = ("Identity", "PlaceholderWithDefault")
    while tensor.op.type in passing and not tensor.op.control_inputs:
        (tensor,) = tensor.op.inputs
    return tensor


def _arguments_of(
    graph: tf.Graph, fed: Sequence[tf.Tensor], results: Sequence[tf.Tensor]
) -> list[list[int]]:
    """Return the indices of the arguments that each result may depend on."""
    masks: dict[Any, int] = {tensor.op: 1 << i for i, tensor in enumerate(fed)}
    before: dict[Any, int] | None = None
    while masks != before:  # only in loops, an op can come before its inputs
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
    """Return arrays as tensors with `signature`'s dtypes. Tensors stay as they are."""
    return [
        value if isinstance(value, tf.Tensor) else as_tensor(value, spec.dtype)
        for value, spec in zip(values, signature, strict=True)
    ]


def before(stop: tf.Tensor) -> Callable[..., tf.Tensor]:
    """Return a condition for `tf.while_loop`: the first variable is < `stop`."""

    def is_before(index: tf.Tensor, *_: Any) -> tf.Tensor:
        return index < stop

    return is_before


_ALIGNMENT = 64
"""Alignment in bytes that TensorFlow's ops rely on. It does not check shared memory."""

_SHARED_KINDS = "biufc"
"""Kinds of dtypes with one representation in NumPy and TensorFlow."""


def as_tensor(array: Any, dtype: tf.DType) -> tf.Tensor:
    """Return an eager tensor with the values of an array, by one copy.

    `tf.constant` copies large arrays three times. Here the tensor uses the memory of
    the copy. With a GPU, and for strings and bfloat16, `tf.constant` is used.
    """
    if not _is_shared(dtype):
        return tf.constant(array, dtype)
    owned = _empty(np.shape(array), dtype)
    np.copyto(owned, array)
    return _share(owned)


def concatenate(arrays: Sequence[NDArray[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return at least one array, concatenated, as an eager tensor, by one copy."""
    if not _is_shared(dtype):
        return tf.constant(np.concatenate(arrays), dtype)
    length = sum(len(array) for array in arrays)
    owned = _empty((length, *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=owned)
    return _share(owned)


def stack(arrays: Sequence[NDArray[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return arrays of one shape, stacked, as an eager tensor, by one copy."""
    if not _is_shared(dtype):
        return tf.constant(np.stack(arrays), dtype)
    owned = _empty((len(arrays), *np.shape(arrays[0])), dtype)
    np.stack(arrays, out=owned)
    return _share(owned)


def count_bytes(tensor: tf.Tensor) -> int:
    """Return the approximate bytes of an eager tensor."""
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64)))
    num_elements = tensor.shape.num_elements() or 0  # faster than an op
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
