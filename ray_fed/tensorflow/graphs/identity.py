"""Hashes the work of a computation. The hash is equal in every Python process.

TensorFlow and Keras number their names over a whole process. So nodes and functions are
described by their positions in the graph. Constants are part of the description, but
lines of source code are not. Random numbers of a graph depend on its hash. A resumed
run compares the hashes of whole computations.

Numbers of an algorithm, such as a learning rate, have marks in a graph (see `numbers`).
Their values are part of the hash of a computation, but not of the hash of a graph.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import federated_language as fl

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.numbers as numbers
from ray_fed.language import blocks

_PROCESS_ATTRS = frozenset(("config_proto", "container", "debug_name", "shared_name"))
"""Attributes with names, threads or devices of the process that traced the graph.
Attributes that begin with `_` are not described either."""

_MOST_BYTES = 1024
"""Maximum bytes of a constant in a description. Longer ones are hashed."""


def identify_computation(comp: fl.framework.ConcreteComputation) -> str:
    """Return a hash of the work of a computation, in hexadecimal digits.

    Two processes that trace the same Python code get the same hash if they have the
    same versions of TensorFlow, Keras and ray_fed. Constants count, so the hash differs
    if a computation contains other random weights.

    Raises:
        ValueMismatchError: `comp` is not a computation.
        UnsupportedError: A graph has Python functions, which belong to one process.
    """
    proto = blocks.parse_block(blocks.serialize_computation(comp)).to_proto()
    for message in graph_message.messages_of(proto):
        graph_message.check_portable(message)
        content = content_of(message).hex()
        inputs = [*numbers.read(message)]
        message.Clear()
        message.initialize_op = content + (repr(inputs) if inputs else "")
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def find_used_parameters(comp: fl.framework.ConcreteComputation) -> list[bool]:
    """Return whether the result depends on each tensor and sequence of the parameter.

    `comp` has one graph. The arguments of functions in the graph count as used.
    """
    (message,) = graph_message.messages_of(comp.to_proto())
    return graph_message.find_used(message)


def content_of(message: Any) -> bytes:
    """Return a hash of the graph of a `pb.TensorFlow`, on which random numbers depend.

    The values of numbers (see `numbers`) do not count. Raises UnsupportedError if the
    graph calls Python functions of another process.
    """
    graph = graph_message.graph_of(message)
    library = _Library(graph.library)
    names = _Names(node.name for node in graph.node)
    nodes = [
        _describe_node(node, names, library, is_input=numbers.MARK in node.attr)
        for node in graph.node
    ]
    bound = [
        [names.place(name) for name in graph_message.bound_names(binding)]
        for binding in (message.parameter, message.result)
    ]
    first = names.place(message.initialize_op)
    described = repr((nodes, bound, first, library.describe()))
    return hashlib.sha256(described.encode()).digest()


class _Names:
    """The positions of nodes in a graph."""

    def __init__(self, names: Iterator[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    def place(self, tensor: str) -> str:
        """Replace `a` by its position in an input: `^a`, `a:1` or `a:output:0`."""
        bare = tensor.removeprefix("^")
        name, colon, output = bare.partition(":")
        control = "^" * (bare != tensor)
        # `a` and `a:0` are one output in a graph.
        ending = "" if output == "0" else colon + output
        return f"{control}{self._places.get(name, name)}{ending}"


class _Library:
    """The functions of a graph, in the order in which they are first called."""

    def __init__(self, library: Any) -> None:
        self._functions = {each.signature.name: each for each in library.function}
        self._places: dict[str, int] = {}

    def place(self, name: str) -> str:
        if name not in self._functions:
            return name
        return f"function {self._places.setdefault(name, len(self._places))}"

    def describe(self) -> list[Any]:
        # A description may give further functions a position.
        described: list[Any] = []
        while len(described) < len(self._places):
            name = list(self._places)[len(described)]
            described.append(self._describe(self._functions[name]))
        return described

    def _describe(self, function: Any) -> Any:
        arguments = [each.name for each in function.signature.input_arg]
        nodes = [node.name for node in function.node_def]
        names = _Names(iter([*arguments, *nodes]))
        outputs = [each.name for each in function.signature.output_arg]
        return (
            [each.type for each in function.signature.input_arg],
            [_describe_node(node, names, self) for node in function.node_def],
            [names.place(function.ret[name]) for name in outputs],
            sorted(names.place(name) for name in function.control_ret.values()),
        )


def _describe_node(
    node: Any, names: _Names, library: _Library, *, is_input: bool = False
) -> Any:
    attributes: Mapping[str, Any] = node.attr
    return (
        library.place(node.op),
        _inputs_of(node, names),
        node.device,
        [
            (key, _describe_attribute(attributes[key], library))
            for key in sorted(attributes)
            if key not in _PROCESS_ATTRS
            and not key.startswith("_")
            and not (is_input and key == "value")
        ],
    )


def _inputs_of(node: Any, names: _Names) -> list[str]:
    # TensorFlow sorts control inputs by name, and names differ from process to process.
    places = [names.place(name) for name in node.input]
    tensors = [place for place in places if not place.startswith("^")]
    return tensors + sorted(place for place in places if place.startswith("^"))


def _describe_attribute(value: Any, library: _Library) -> Any:
    match value.WhichOneof("value"):
        case "func":
            return library.place(value.func.name)
        case "list" if value.list.func:
            return [library.place(each.name) for each in value.list.func]
        case _:
            serialized: bytes = value.SerializeToString(deterministic=True)
            is_long = len(serialized) > _MOST_BYTES
            return hashlib.sha256(serialized).digest() if is_long else serialized
