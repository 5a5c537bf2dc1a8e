"""Writes and reads a TensorFlow computation: the message `pb.TensorFlow`.

The message has a graph, and *bindings*: the names of the tensors of its parameter and
its result. Tracing writes them, and loading reads them. A sequence is bound by the
variant tensor of its dataset or, as in newer versions of TensorFlow Federated, by the
dataset's serialized graph.

The graph's debug information has the lines of the user's code, for error messages. The
hash of a computation does not depend on them.
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
from ray_fed.language import trees
from ray_fed.language.structs import Struct, to_struct
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.tensors import specs

# TensorFlow creates these classes on import, so type checkers do not know them.
GraphDef: TypeAlias = Any
"""A graph: its nodes, and a library of functions that they call."""

NodeDef: TypeAlias = Any
"""An op of a graph or of a function, with its kind, inputs and attributes."""

FunctionDef: TypeAlias = Any
"""A function of a graph's library, with its signature and nodes."""

TensorFlowMessage: TypeAlias = Any
"""A `pb.TensorFlow`: a graph, and the tensors bound to its argument and result."""


_COMPUTATION_KEY = "ray_fed computation"
"""A key of the graph's debug information that is not the name of a node."""


class Place(NamedTuple):
    """A line of the user's code. `file` is the last part of the file's path."""

    file: str
    line: int
    name: str


def write(graph_def: GraphDef, fn: Callable[..., Any]) -> None:
    """Record the name and the line of the function that a GraphDef was traced from."""
    function = _innermost(fn)
    name = getattr(function, "__name__", type(function).__name__)
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    frame = graph_def.debug_info.traces[_COMPUTATION_KEY].file_line_cols.add(func=name)
    if code is not None and not tracebacks.is_own(code.co_filename):
        graph_def.debug_info.files.append(tracebacks.short_file(code.co_filename))
        frame.line = code.co_firstlineno


def read(graph_def: GraphDef) -> str:
    """Return the function's name that `write` recorded, with its line if known."""
    debug_info = graph_def.debug_info
    if _COMPUTATION_KEY not in debug_info.traces:
        return "a TensorFlow computation"
    (frame,) = debug_info.traces[_COMPUTATION_KEY].file_line_cols
    line = f" ({debug_info.files[0]}:{frame.line})" if frame.line else ""
    return f"the computation `{frame.func}`{line}"


def _innermost(fn: Any) -> Any:
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    while isinstance(fn, functools.partial):
        fn = inspect.unwrap(fn.func)
    return getattr(fn, "__func__", fn)


def write_places(graph_def: GraphDef, graph: tf.Graph) -> None:
    """Record the line of the user's code that made each node of a GraphDef.

    These are lines of the traced function, and of the user's layers, losses and metrics
    that ray_fed calls. Only the last part of a file's path is recorded, because a
    message can leave the user's machine. `graph` is the traced graph.
    """
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
    """Return a sentence about the user's line that an error is about, or ""."""
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
"""The name of a tensor in the message of an assertion."""


def _with_parents(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        parts = name.split("/")
        for end in range(len(parts), 0, -1):
            scope = "/".join(parts[:end])
            yield scope
            yield re.sub(r"_\d+$", "", scope)


def _with_functions(graph: tf.Graph) -> list[tf.Graph]:
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
    # Reading a frame takes 15 us, and `last_user_frame` takes 6 us (2026). So frames
    # are read once for each layer of a model.
    stack: Any = op.traceback
    if stack is None:  # the op belongs to a computation that is called inside
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
"""A key of the graph's debug information that is not the name of a node."""


def write_process(graph_def: GraphDef) -> None:
    """Record that this process traced a graph, if the graph calls Python functions.

    The graph has only the number of such a function in a table of the process. In
    another process, the number may belong to another function.
    """
    if has_python_functions(graph_def):
        frames = graph_def.debug_info.traces[_PROCESS_KEY].file_line_cols
        frames.add(func=_this_process())


def has_python_functions(graph_def: GraphDef) -> bool:
    """Return whether a graph, or a function of its library, calls Python code."""
    return any(_callback_ops(graph_def))


def _callback_ops(graph_def: GraphDef) -> Iterator[str]:
    for nodes in all_nodes(graph_def):
        yield from (node.op for node in nodes if node.op in _OPS)


def _process_of(graph_def: GraphDef) -> str | None:
    traces = graph_def.debug_info.traces
    return (
        traces[_PROCESS_KEY].file_line_cols[0].func if _PROCESS_KEY in traces else None
    )


def _this_process() -> str:
    return f"{_token()} {os.getpid()}"  # a fork has the same token


@functools.cache
def _token() -> str:
    return uuid.uuid4().hex


def _stays_error(graph_def: GraphDef) -> errors.UnsupportedError:
    kinds = ", ".join(sorted(set(_callback_ops(graph_def))))
    return errors.UnsupportedError(
        f"Expected TensorFlow's own operations in {read(graph_def)}, found"
        f" Python functions ({kinds}) of another process. A tf.py_function, a"
        " tf.numpy_function and a Dataset.from_generator run only in the process that"
        ' traced them: use TensorFlow\'s own operations, or Config(backend="local") in'
        " that process."
    )


_ADDED = re.compile(r"^__(?:inference|forward|backward)_|(?:_\d+)+$")
"""Parts that TensorFlow adds to a function's name, such as `__inference_train_362`."""


def name_by_place(graph_def: GraphDef) -> None:
    """Rename the library functions of a GraphDef in the order of their calls, in place.

    TensorFlow's names contain a count of all functions of the process. The new names
    and the new order depend on the graph alone. Functions that no node calls are last.
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
    """Yield the names of the functions that a node calls, from its attributes."""
    for key in sorted(node.attr):
        yield from _named_functions(node.attr[key])


def _named_functions(value: Any) -> Iterator[str]:
    for function in [value.func] if value.HasField("func") else value.list.func:
        yield function.name
        for key in sorted(function.attr):
            yield from _named_functions(function.attr[key])


def digest_library(graph_def: GraphDef) -> str:
    """Return a hash of all library functions of a GraphDef, in hexadecimal digits."""
    library = graph_def.library.SerializeToString(deterministic=True)
    return hashlib.sha256(library).hexdigest()[:16]


def rename_functions(graph_def: GraphDef, rename: Callable[[str, int], str]) -> None:
    """Rename the library functions of a GraphDef and all references to them, in place.

    `rename` maps the name and the index of a library function to the new name.
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
    """Return the nodes of a graph and of each of its library functions."""
    return [graph_def.node, *(f.node_def for f in graph_def.library.function)]


def node_of(source: str) -> str:
    """Return the node's name in the name of an input, such as `a` for `^a` or `a:1`."""
    return source.removeprefix("^").split(":")[0]


def make_constant(node: NodeDef, *, value: Any, dtype: tf.DType) -> None:
    """Turn a node into a constant, in place."""
    node.op = "Const"
    del node.input[:]
    node.attr.clear()
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))


def reached(
    nodes: Mapping[str, NodeDef],
    roots: Iterable[str],
    stops: AbstractSet[str] = frozenset(),
) -> Iterator[str]:
    """Yield the names of the roots and of all nodes that they depend on, inputs first.

    In a loop of TensorFlow 1, inputs cannot all come first. Names that are not in
    `nodes`, such as arguments of a function, are yielded, too. Inputs of ops of a kind
    in `stops` are not followed.
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
"""A `pb.TensorFlow.Binding`: the names of the tensors of a parameter or a result."""


def stamp_parameter(type_spec: fl.Type, name: str = "arg") -> tuple[Any, Binding]:
    """Add placeholders for a parameter to the current graph, named after `name`.

    Return the value to pass to the traced function, with Structs for structs, and its
    binding. Raises TypeError for a type that graphs do not have.
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
    """Return the binding of the result of a traced function, in the current graph.

    `mark` maps each returned tensor to the tensor that is bound. Raises TypeError for a
    type that graphs do not have.
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
    """Return the names of a binding's tensors, in the order of its type."""
    return [
        leaf.tensor.tensor_name
        or leaf.sequence.variant_tensor_name
        or leaf.sequence.graph_def_tensor_name
        for leaf in _leaves(binding)
    ]


def to_bound(tensors: Sequence[tf.Tensor], binding: Binding) -> list[tf.Tensor]:
    """Return the tensors to feed. Datasets are serialized if the binding takes that."""
    return [
        tensor if is_variant else tf.raw_ops.DatasetToGraphV2(input_dataset=tensor)
        for tensor, is_variant in zip(tensors, are_variants(binding), strict=True)
    ]


def from_bound(tensors: Sequence[tf.Tensor], binding: Binding) -> list[tf.Tensor]:
    """Return the leaves of a value from fetched tensors, the inverse of `to_bound`."""
    return [
        tensor if is_variant else tf.raw_ops.DatasetFromGraph(graph_def=tensor)
        for tensor, is_variant in zip(tensors, are_variants(binding), strict=True)
    ]


def are_variants(binding: Binding) -> list[bool]:
    """Return for each bound tensor False if it is a serialized dataset, or True."""
    return [not leaf.sequence.graph_def_tensor_name for leaf in _leaves(binding)]


def _leaves(binding: Binding) -> list[Binding]:
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
    """Return the message of a graph that was traced from the Python function `fn`.

    `initialize_op` is the name of the op that each call runs first, or None.
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
    # TensorFlow's registry would keep the gradients of `tf.custom_gradient`, and the
    # traced graph, forever. No other graph can use them: they refer to its tensors.
    registry: Any = ops.gradient_registry
    registered = registry._registry  # noqa: SLF001 (no public way to remove a key)
    for nodes in all_nodes(graph_def):
        for node in nodes:
            if "_gradient_op_type" in node.attr:
                name = node.attr["_gradient_op_type"].s.decode()
                if name.startswith("CustomGradient-"):
                    registered.pop(name, None)


def build_computation(message: TensorFlowMessage, type_spec: fl.FunctionType) -> Any:
    """Return the `pb.Computation` with a message and its type."""
    return pb.Computation(type=type_spec.to_proto(), tensorflow=message)


def messages_of(message: Any) -> Iterator[Any]:
    """Yield all `pb.TensorFlow` messages in a protobuf message, in order."""
    if message.DESCRIPTOR.full_name == pb.TensorFlow.DESCRIPTOR.full_name:
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        is_one = hasattr(value, "DESCRIPTOR")
        for member in (value,) if is_one else value:
            yield from messages_of(member)


def graph_of(message: TensorFlowMessage) -> Any:
    """Return a copy of the graph of a message, without debug information.

    Raises UnsupportedError if the graph calls Python functions of another process.
    """
    graph_def = _read_any(message)
    if any(_callback_ops(graph_def)) and _process_of(graph_def) != _this_process():
        raise _stays_error(graph_def)
    graph_def.ClearField("debug_info")
    _call_by_attribute(graph_def)
    return graph_def


def _call_by_attribute(graph_def: Any) -> None:
    # `tf.nn.ctc_loss` has ops of TensorFlow 1 whose kind is the function they call.
    # TensorFlow imports one only if its function was registered before, and all other
    # code looks for calls in attributes.
    signatures = {f.signature.name: f.signature for f in graph_def.library.function}
    _replace_calls(graph_def.node, signatures)
    for function in graph_def.library.function:
        renamed = _replace_calls(function.node_def, signatures)
        if renamed:
            for node in function.node_def:
                node.input[:] = [renamed.get(name, name) for name in node.input]
            for result, name in list(function.ret.items()):
                function.ret[result] = renamed.get(name, name)


def _replace_calls(nodes: Any, signatures: Mapping[str, Any]) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for node in nodes:
        signature = signatures.get(node.op)
        if signature is None:
            continue
        node.attr["f"].func.name = node.op
        node.op = (
            "StatefulPartitionedCall" if signature.is_stateful else "PartitionedCall"
        )
        for attribute, arguments in (
            ("Tin", signature.input_arg),
            ("Tout", signature.output_arg),
        ):
            node.attr[attribute].list.type.extend(each.type for each in arguments)
        for index, output in enumerate(signature.output_arg):
            renamed[f"{node.name}:{output.name}:0"] = f"{node.name}:output:{index}"
    return renamed


def origin_of(message: TensorFlowMessage) -> str:
    """Return the computation's name for error messages, with its line if known."""
    return read(_read_any(message))


def find_place(message: TensorFlowMessage, text: str) -> str:
    """Return the result of `place_of` for the graph of a message."""
    return place_of(_read_any(message), text)


def find_used(message: TensorFlowMessage) -> list[bool]:
    """Return whether the result depends on each tensor of the parameter, in order."""
    nodes = {node.name: node for node in _read_any(message).node}
    used = set(reached(nodes, map(node_of, bound_names(message.result))))
    return [node_of(name) in used for name in bound_names(message.parameter)]


def check_portable(message: TensorFlowMessage) -> None:
    """Raise UnsupportedError if a graph calls a Python function.

    The function exists only in the process that traced the graph.
    """
    graph_def = _read_any(message)
    if any(_callback_ops(graph_def)):
        raise _stays_error(graph_def)


def _read_any(message: TensorFlowMessage) -> Any:
    graph_def = tf.compat.v1.GraphDef()
    message.graph_def.Unpack(graph_def)
    return graph_def


_FIRST = "ray_fed_first_"
"""Prefix of the nodes of the first of two joined graphs, also in function names."""


def compose_all(
    message: TensorFlowMessage,
    type_spec: fl.FunctionType,
    leaves: Sequence[Any],
    returned: type[Any],
) -> tuple[TensorFlowMessage, fl.FunctionType, Sequence[Any]]:
    """Join a computation with the computations that returned its sequences.

        rows -> Batch(rows)          batches -> Reduce(batches)      two messages
    rows -> Reduce(Batch(rows))                                  one message

    In the joined graph, the dataset between them need not exist.

    `leaves` are the tensors and sequences of the argument, in order. A sequence of the
    class `returned` has the computation that returned it, and its argument. The result
    is the joined computation, its type and the leaves of its argument, or everything
    unchanged without a sequence of this class. Raises Fallback if the joined
    computation would not be equivalent.
    """
    if not any(isinstance(leaf, returned) for leaf in leaves):
        return message, type_spec, leaves
    types, composed = trees.leaf_types(type_spec.parameter), list(leaves)
    for index, leaf in reversed(list(enumerate(leaves))):
        if isinstance(leaf, returned):
            message = _compose(leaf.message, message, index)
            types[index : index + 1] = leaf.types
            composed[index : index + 1] = leaf.leaves
    return message, fl.FunctionType(fl.StructType(types), type_spec.result), composed


def _compose(
    first: TensorFlowMessage, second: TensorFlowMessage, index: int
) -> TensorFlowMessage:
    # The result of the first message is fed to the second one, as its leaf `index`.
    if first.initialize_op or first.session_token_tensor_name:
        raise Fallback("a sequence result of a computation with state")
    if not all(are_variants(first.result)):
        raise Fallback("a sequence result as a serialized graph")
    second_leaves = _leaves(second.parameter)
    if not second_leaves[index].sequence.variant_tensor_name:
        raise Fallback("a sequence argument as a serialized graph")
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
    digest = digest_library(graph_def)
    rename_functions(graph_def, lambda name, _: f"{name}_{_FIRST}{digest}")
    for node in graph_def.node:
        node.name = _FIRST + node.name
        node.input[:] = [
            f"^{_FIRST}{name[1:]}" if name.startswith("^") else _FIRST + name
            for name in node.input
        ]
        node.attr.pop("_class", None)  # colocation, which refers to old names


def _feed(graph_def: GraphDef, placeholder: str, source: str) -> None:
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
