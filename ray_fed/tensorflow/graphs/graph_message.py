"""The `pb.TensorFlow` message: which tensors of a graph are parameter and result.

Tracing binds a typed parameter to placeholders and a result to tensors; loading
reads the same bindings back. A sequence is bound by the variant tensor of its
dataset, or, as newer TensorFlow Federated writes it, by its serialised graph.

The lines where a computation and its nodes were traced travel in its graph. They stand
where TensorFlow itself keeps the source of nodes, in the graph's debug information;
that of the computation under a key that is the name of no node. So no op and no tensor
of the graph differs, those who do not know the key pass over it, and what a graph draws
or computes never depends on it. A node has a line where the user's code
made it: the function that is traced, or a layer, a loss or a metric that ray_fed calls.
Of a file only the last part of its path is kept: a message may travel further than a
home directory should.

A graph holds no Python function, only a number for it (`pyfunc_0`) in a table of the
process that wrote the graph. Another process may have another function under that
number, so the table cannot tell whether a graph may run. The graph itself can: a
traced graph with such functions names the process that traced it.

TensorFlow counts the functions that a process traces, and the count is part of their
names. Named by their places in the graph, the same code makes the same graph, however
much was traced before.

Two messages become one where the second takes a sequence that the first returned:

    rows -> Batch(rows)          batches -> Reduce(batches)      two messages
    rows -> Reduce(Batch(rows))                                  one, without a dataset
                                                                 that anybody would see
"""

import copy
import functools
import hashlib
import inspect
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeAlias

import federated_language as fl
import tensorflow as tf
from federated_language.proto import computation_pb2
from tensorflow.python.framework import ops  # no public name

import ray_fed.errors as errors
import ray_fed.tensorflow.tensors.datasets as datasets
import ray_fed.tracebacks as tracebacks
from ray_fed.language.structs import Struct, to_struct
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.tensors import specs

# TensorFlow makes these classes as it is imported: a type checker sees none of them.
GraphDef: TypeAlias = Any
"""A graph: its nodes, and a library of functions that they call."""

NodeDef: TypeAlias = Any
"""An op of a graph or of a function: its kind, inputs and attributes."""

FunctionDef: TypeAlias = Any
"""A function of a graph's library: its signature, and nodes of its own."""

TensorFlowMessage: TypeAlias = Any
"""A `pb.TensorFlow`: a graph, and the tensors bound to its argument and result."""


_COMPUTATION_KEY = "ray_fed computation"


class Place(NamedTuple):
    """A line of the user's code.

    Attributes:
        file: the last part of its path.
        line: its number.
        name: of the function.
    """

    file: str
    line: int
    name: str


def write(graph_def: GraphDef, fn: Callable[..., Any]) -> None:
    """Note in a GraphDef which Python function it was traced from."""
    function = _innermost(fn)
    name = getattr(function, "__name__", type(function).__name__)
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    frame = graph_def.debug_info.traces[_COMPUTATION_KEY].file_line_cols.add(func=name)
    if code is not None and not tracebacks.is_own(code.co_filename):
        graph_def.debug_info.files.append(tracebacks.short_file(code.co_filename))
        frame.line = code.co_firstlineno


def read(graph_def: GraphDef) -> str:
    """Return what an error calls the computation: what `write` noted, if it did."""
    debug_info = graph_def.debug_info
    if _COMPUTATION_KEY not in debug_info.traces:
        return "a TensorFlow computation"
    (frame,) = debug_info.traces[_COMPUTATION_KEY].file_line_cols
    line = f" ({debug_info.files[0]}:{frame.line})" if frame.line else ""
    return f"the computation `{frame.func}`{line}"


def _innermost(fn: Any) -> Any:
    """Return the function that a user wrote, inside of what wraps it."""
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    while isinstance(fn, functools.partial):
        fn = inspect.unwrap(fn.func)
    return getattr(fn, "__func__", fn)


def write_places(graph_def: GraphDef, graph: tf.Graph) -> None:
    """Note in a GraphDef which lines of the user's code made its nodes."""
    places: dict[str, Place | None] = {}
    searched: set[str] = set()  # scopes of layers that the user did not write
    for each in _with_functions(graph):
        for op in each.get_operations():
            place = _place_of(op, searched)
            if place is not None:
                known = places.setdefault(op.name, place)
                if known != place:  # functions may have nodes of one name
                    places[op.name] = None
    debug_info = graph_def.debug_info
    files: dict[str, int] = {}
    for name, place in places.items():
        if place is None:
            continue
        frame = debug_info.traces[name].file_line_cols.add(
            func=place.name, line=place.line
        )
        if place.file not in files:
            files[place.file] = len(debug_info.files)
            debug_info.files.append(place.file)
        frame.file_index = files[place.file]


def place_of(graph_def: GraphDef, text: str) -> str:
    """Return a sentence on the line that made the node an error's text names, or ""."""
    debug_info = graph_def.debug_info
    node = _NODE.search(text)
    named = [node[1]] if node else []
    for name in _with_parents([*named, *_NAME.findall(text)]):
        if name in debug_info.traces and name != _COMPUTATION_KEY:
            frame = debug_info.traces[name].file_line_cols[0]
            line = f"{debug_info.files[frame.file_index]}:{frame.line}"
            return f"At {line}, in `{frame.func}` (`{name}`)."
    if node and node[1].count("/") > 1:  # model/layer/op
        return f"At `{node[1]}`."
    return ""


_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_NAME = re.compile(r"\((\w[\w./>-]*/[\w./>-]+):\d+\)")
"""Of a tensor, in what an assertion shows."""


def _with_parents(names: Iterable[str]) -> Iterator[str]:
    """Yield names of nodes; each without a number at its end; then its scopes."""
    for name in names:
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            scope = "/".join(parts[:end])
            yield scope
            yield re.sub(r"_\d+$", "", scope)


def _with_functions(graph: tf.Graph) -> list[tf.Graph]:
    """Return a graph and the bodies of its functions, each once."""
    graphs = {id(graph): graph}
    pending = [graph]
    while pending:
        for function in pending.pop()._functions.values():  # noqa: SLF001 (no other)
            body = getattr(function, "graph", None)
            if body is not None and id(body) not in graphs:
                graphs[id(body)] = body
                pending.append(body)
    return list(graphs.values())


def _place_of(op: tf.Operation, searched: set[str]) -> Place | None:
    """Return the innermost line of the user's code inside of what ray_fed traces.

    A frame takes 15 us to read (2026), the last one that is not TensorFlow's 6 us.
    """
    stack: Any = op.traceback
    if stack is None:  # of a computation that is called inside
        return None
    frame = stack.last_user_frame()
    if tracebacks.is_of_user(frame.filename):
        return Place(tracebacks.short_file(frame.filename), frame.lineno, frame.name)
    layer = op.name.split("/")[:-1][:2]  # of a model
    scope = "/".join(layer)
    if scope in searched or not (scope or op.type == "Assert"):
        return None
    for index in range(len(stack) - 1, -1, -1):
        frame = stack[index]
        if tracebacks.is_own(frame.filename):
            break
        if tracebacks.is_of_user(frame.filename):
            file = tracebacks.short_file(frame.filename)
            return Place(file, frame.lineno, frame.name)
    searched.add(scope)
    return None


_OPS = frozenset({"EagerPyFunc", "GeneratorDataset", "PyFunc", "PyFuncStateless"})
_PROCESS_KEY = "ray_fed process"
"""In the graph's debug information; the name of no node."""


def write_process(graph_def: GraphDef) -> None:
    """Note in a graph with Python functions that this process traced it."""
    if any(_callback_ops(graph_def)):
        frames = graph_def.debug_info.traces[_PROCESS_KEY].file_line_cols
        frames.add(func=_this_process())


def _callback_ops(graph_def: GraphDef) -> Iterator[str]:
    """Yield the kinds of the ops that call Python functions."""
    for nodes in all_nodes(graph_def):
        yield from (node.op for node in nodes if node.op in _OPS)


def _process_of(graph_def: GraphDef) -> str | None:
    traces = graph_def.debug_info.traces
    return (
        traces[_PROCESS_KEY].file_line_cols[0].func if _PROCESS_KEY in traces else None
    )


def _this_process() -> str:
    return f"{_token()} {os.getpid()}"  # a fork has the token, and numbers of its own


@functools.cache
def _token() -> str:
    return uuid.uuid4().hex


def _stays_error(graph_def: GraphDef) -> errors.UnsupportedError:
    kinds = ", ".join(sorted(set(_callback_ops(graph_def))))
    return errors.UnsupportedError(
        f"Expected TensorFlow's own operations in {read(graph_def)}, found"
        f" Python functions ({kinds}) that would run in another process than the one"
        " that traced them. A tf.py_function, a tf.numpy_function and a"
        " Dataset.from_generator stay in the process that made it: use TensorFlow's"
        ' own operations, or Config(backend="local") in that process.'
    )


_ADDED = re.compile(r"^__(?:inference|forward|backward)_|(?:_\d+)+$")
"""What TensorFlow adds to a function's own name, as in `__inference_train_362`."""


def name_by_place(graph_def: GraphDef) -> None:
    """Name and order functions by the first place where each is called, in place.

    Functions that no node calls stay behind them, by their names.
    """
    library = graph_def.library
    functions = {each.signature.name: each for each in library.function}
    called = list(_calls_of(graph_def.node, functions))
    names = [*called, *sorted(functions.keys() - set(called))]
    copies = [copy.deepcopy(functions[name]) for name in names]
    library.ClearField("function")
    library.function.extend(copies)
    rename_functions(graph_def, lambda name, i: f"{_ADDED.sub('', name)}_{i}")


def _calls_of(nodes: Iterable[NodeDef], functions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the functions that nodes call, and those that these call, once each."""
    pending = [iter(nodes)]
    seen: set[str] = set()
    while pending:
        node = next(pending[-1], None)
        if node is None:
            pending.pop()
            continue
        for name in [node.op, *functions_of(node)]:
            if name in functions and name not in seen:
                seen.add(name)
                yield name
                pending.append(iter(functions[name].node_def))


def functions_of(node: NodeDef) -> Iterator[str]:
    """Yield the names of the functions that the attributes of a node name."""
    for key in sorted(node.attr):
        yield from _named_functions(node.attr[key])


def _named_functions(value: Any) -> Iterator[str]:
    for function in [value.func] if value.HasField("func") else value.list.func:
        yield function.name
        for key in sorted(function.attr):
            yield from _named_functions(function.attr[key])


def digest_library(graph_def: GraphDef) -> str:
    """Return a hash of all library functions of a GraphDef, for names of their own."""
    library = graph_def.library.SerializeToString(deterministic=True)
    return hashlib.sha256(library).hexdigest()[:16]


def rename_functions(graph_def: GraphDef, rename: Callable[[str, int], str]) -> None:
    """Give library functions of a GraphDef other names, in place, wherever they stand.

    Args:
        graph_def: to rewrite.
        rename: from the name of a function, and its place in the library, to another.
    """
    library = graph_def.library
    names = [function.signature.name for function in library.function]
    renamed = {name: rename(name, index) for index, name in enumerate(names)}
    if not renamed:
        return
    for function in library.function:
        name = function.signature.name
        function.signature.name = renamed.get(name, name)
        _rename_in_attributes(function.attr, renamed)
    for gradient in library.gradient:
        gradient.function_name = renamed.get(
            gradient.function_name, gradient.function_name
        )
        gradient.gradient_func = renamed.get(
            gradient.gradient_func, gradient.gradient_func
        )
    for nodes in all_nodes(graph_def):
        for node in nodes:
            node.op = renamed.get(node.op, node.op)
            _rename_in_attributes(node.attr, renamed)


def _rename_in_attributes(attributes: Any, renamed: Mapping[str, str]) -> None:
    for value in attributes.values():
        functions = [value.func] if value.HasField("func") else list(value.list.func)
        for function in functions:
            function.name = renamed.get(function.name, function.name)
            _rename_in_attributes(function.attr, renamed)
        if value.HasField("s"):
            name = value.s.decode(errors="replace")
            value.s = renamed[name].encode() if name in renamed else value.s


def all_nodes(graph_def: GraphDef) -> list[Any]:
    """Return the nodes of a graph, and those of each function of its library."""
    return [graph_def.node, *(f.node_def for f in graph_def.library.function)]


def node_of(source: str) -> str:
    """Return the name of the node that an input comes from."""
    return source.removeprefix("^").split(":")[0]


def reached(
    nodes: Mapping[str, NodeDef],
    roots: Iterable[str],
    stops: AbstractSet[str] = frozenset(),
) -> Iterator[str]:
    """Yield names of what roots wait for, and these; inputs first, where no loop is.

    Args:
        nodes: by name. A name that is none of theirs, such as of a function's argument,
            is yielded too.
        roots: names of nodes.
        stops: kinds of ops whose inputs do not count.
    """
    entered: set[str] = set()
    pending = [(name, False) for name in reversed(list(roots))]
    while pending:
        name, is_done = pending.pop()
        if is_done:
            yield name
        elif name not in entered:
            entered.add(name)
            pending.append((name, True))
            if name in nodes and nodes[name].op not in stops:
                sources = map(node_of, reversed(nodes[name].input))
                pending += [(source, False) for source in sources]


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
    return [
        leaf.tensor.tensor_name
        or leaf.sequence.variant_tensor_name
        or leaf.sequence.graph_def_tensor_name
        for leaf in _leaves(binding)
    ]


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
    return [not leaf.sequence.graph_def_tensor_name for leaf in _leaves(binding)]


def _leaves(binding: Binding) -> list[Binding]:
    """Return the bindings of tensors and sequences in one, in the order of its type."""
    match binding.WhichOneof("binding"):
        case "struct":
            return [leaf for e in binding.struct.element for leaf in _leaves(e)]
        case None:
            return []
        case _:
            return [binding]


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
    name_by_place(graph_def)
    write(graph_def, fn)
    write_places(graph_def, graph)
    write_process(graph_def)
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
    for nodes in all_nodes(graph_def):
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
        UnsupportedError: it has Python functions of another process, or of one that it
            does not name.
    """
    graph_def = _read_any(message)
    if any(_callback_ops(graph_def)) and _process_of(graph_def) != _this_process():
        raise _stays_error(graph_def)
    graph_def.ClearField("debug_info")
    return graph_def


def origin_of(message: TensorFlowMessage) -> str:
    """Return what an error calls the computation: its name and line, where known."""
    return read(_read_any(message))


def find_place(message: TensorFlowMessage, text: str) -> str:
    """Return a sentence on the line that made the node an error's text names, or ""."""
    return place_of(_read_any(message), text)


def check_portable(message: TensorFlowMessage) -> None:
    """Raise if a message cannot run in another process than the one that made it.

    Raises:
        UnsupportedError: it has Python functions.
    """
    graph_def = _read_any(message)
    if any(_callback_ops(graph_def)):
        raise _stays_error(graph_def)


def _read_any(message: TensorFlowMessage) -> Any:
    """Return the GraphDef that the message holds as a protobuf `Any`."""
    graph_def = tf.compat.v1.GraphDef()
    message.graph_def.Unpack(graph_def)
    return graph_def


_FIRST = "ray_fed_first_"
"""Starts the names of the first message's nodes, and ends those of its functions."""


def flat_types(type_spec: fl.Type | None) -> list[fl.Type]:
    """Return the tensors and sequences of a type, in order."""
    if isinstance(type_spec, fl.StructType):
        return [
            leaf for _, element in type_spec.items() for leaf in flat_types(element)
        ]
    return [] if type_spec is None else [type_spec]


def compose_all(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    leaves: Sequence[Any],
    returned: type[Any],
) -> tuple[TensorFlowMessage, fl.FunctionType, Sequence[Any]]:
    """Return a computation of what the sequences that it takes were made of, and that.

    The computation itself, and its own leaves, where none was returned.

    Args:
        message: of the computation.
        type_spec: its type.
        leaves: that it is given: tensors and sequences.
        returned: the class of sequences that another computation returned: they have
            its `message`, and the `types` and the `leaves` that it was given.

    Raises:
        Fallback: it would not be the same.
    """
    if not any(isinstance(leaf, returned) for leaf in leaves):
        return message, type_spec, leaves
    types, composed = flat_types(type_spec.parameter), list(leaves)
    for index, leaf in reversed(list(enumerate(leaves))):
        if isinstance(leaf, returned):
            message = _compose(leaf.message, message, index)
            types[index : index + 1] = leaf.types
            composed[index : index + 1] = leaf.leaves
    return message, fl.FunctionType(fl.StructType(types), type_spec.result), composed


def _compose(
    first: TensorFlowMessage, second: TensorFlowMessage, index: int
) -> TensorFlowMessage:
    """Return the second message of what the first one returns.

    It takes, flat, what the second one takes, with what the first one takes in the
    place of the sequence at an index.
    """
    if first.initialize_op or first.session_token_tensor_name:
        raise Fallback("a sequence result of a computation with state")
    if not all(are_variants(first.result)):
        raise Fallback("a sequence result as a serialised graph")
    second_leaves = _leaves(second.parameter)
    if not second_leaves[index].sequence.variant_tensor_name:
        raise Fallback("a sequence argument as a serialised graph")
    before, after = graph_of(first), graph_of(second)
    (returned,) = bound_names(first.result)
    _rename_all(before)
    _feed(after, second_leaves[index].sequence.variant_tensor_name, _FIRST + returned)
    after.node.extend(before.node)
    after.library.MergeFrom(before.library)
    composed = type(second)()
    composed.CopyFrom(second)
    composed.graph_def.Pack(after, deterministic=True)
    first_leaves = [_renamed(leaf) for leaf in _leaves(first.parameter)]
    bindings = [*second_leaves[:index], *first_leaves, *second_leaves[index + 1 :]]
    composed.parameter.Clear()
    composed.parameter.struct.element.extend(bindings)
    return composed


def _renamed(leaf: Any) -> Any:
    """Return the binding of a tensor of the first message, in the composed one."""
    renamed = type(leaf)()
    renamed.CopyFrom(leaf)
    if leaf.WhichOneof("binding") == "tensor":
        renamed.tensor.tensor_name = _FIRST + leaf.tensor.tensor_name
    elif leaf.sequence.variant_tensor_name:
        renamed.sequence.variant_tensor_name = (
            _FIRST + leaf.sequence.variant_tensor_name
        )
    else:
        name = leaf.sequence.graph_def_tensor_name
        renamed.sequence.graph_def_tensor_name = _FIRST + name
    return renamed


def _rename_all(graph_def: GraphDef) -> None:
    """Give nodes and functions names that no other graph has."""
    digest = digest_library(graph_def)
    rename_functions(graph_def, lambda name, _: f"{name}_{_FIRST}{digest}")
    for node in graph_def.node:
        node.name = _FIRST + node.name
        node.input[:] = [
            f"^{_FIRST}{name[1:]}" if name.startswith("^") else _FIRST + name
            for name in node.input
        ]
        if "_class" in node.attr:  # of colocation, by name
            del node.attr["_class"]


def _feed(graph_def: GraphDef, placeholder: str, source: str) -> None:
    """Let a graph read another tensor where it reads a placeholder."""
    fed = node_of(placeholder)
    kept = [node for node in graph_def.node if node.name != fed]
    name, _, output = source.partition(":")
    source = name if output in ("", "0") else source
    del graph_def.node[:]
    graph_def.node.extend(kept)
    for node in graph_def.node:
        node.input[:] = [
            source
            if tensor in (fed, f"{fed}:0")
            else (f"^{name}" if tensor == f"^{fed}" else tensor)
            for tensor in node.input
        ]
