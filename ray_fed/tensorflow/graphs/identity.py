"""What a computation does, as a hash that is the same in every Python process.

TensorFlow and Keras count the names that they give, over all of a process; so a graph
is described by the places of its nodes and functions, not by their names. What an op
computes with, such as a learning rate in a constant, counts; where it was written in
the source does not. Random draws are keyed by it, and a resumed run compares it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import federated_language as fl

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.language import blocks

_PROCESS_ATTRS = frozenset(("config_proto", "container", "debug_name", "shared_name"))
"""Attributes that hold names, as those do that begin with `_`, or threads and devices
of the process that traced."""

_MOST_BYTES = 1024
"""Of a constant that stands in a description; a longer one is hashed before."""


def identify_computation(comp: fl.framework.ConcreteComputation) -> str:
    """Return a hash of what a computation does, in hexadecimal digits.

    Two processes that trace the same Python code get the same one, if they have the
    same versions of TensorFlow, Keras and ray_fed. Constants count: so it differs where
    a computation embeds random weights.

    Raises:
        ValueMismatchError: `comp` is no computation.
        UnsupportedError: a graph has Python functions, which belong to one process.
    """
    proto = blocks.parse_block(blocks.serialize_computation(comp)).to_proto()
    for message in _tensorflow_messages(proto):
        graph_message.check_portable(message)
        described = content_of(message).hex()
        message.Clear()
        message.initialize_op = described
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


def _tensorflow_messages(message: Any) -> Iterator[Any]:
    """Return the `pb.TensorFlow` messages inside of a message, in order."""
    if message.DESCRIPTOR.full_name == graph_message.pb.TensorFlow.DESCRIPTOR.full_name:
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        is_one = hasattr(value, "DESCRIPTOR")
        for member in (value,) if is_one else value:
            yield from _tensorflow_messages(member)


def content_of(message: Any) -> bytes:
    """Return a hash of what one graph does, which keys its draws.

    Args:
        message: a `pb.TensorFlow`.

    Raises:
        UnsupportedError: it has Python functions of another process.
    """
    graph = graph_message.graph_of(message)
    library = _Library(graph.library)
    names = _Names(node.name for node in graph.node)
    nodes = [_describe_node(node, names, library) for node in graph.node]
    bound = [
        [names.place(name) for name in graph_message.bound_names(binding)]
        for binding in (message.parameter, message.result)
    ]
    first = names.place(message.initialize_op)
    described = repr((nodes, bound, first, library.describe()))
    return hashlib.sha256(described.encode()).digest()


class _Names:
    """Nodes by their place in a graph.

    Args:
        names: of the nodes, in order; each once.
    """

    def __init__(self, names: Iterator[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    def place(self, tensor: str) -> str:
        """Return a name such as `^a`, `a:1` or `a:output:0` with the place of `a`."""
        bare = tensor.removeprefix("^")
        name, colon, output = bare.partition(":")
        control = "^" * (bare != tensor)
        # `a` and `a:0` are one output in a graph.
        ending = "" if output == "0" else colon + output
        return f"{control}{self._places.get(name, name)}{ending}"


class _Library:
    """Functions of a graph by the order in which they are first called.

    Args:
        library: of the graph.
    """

    def __init__(self, library: Any) -> None:
        self._functions = {each.signature.name: each for each in library.function}
        self._places: dict[str, int] = {}

    def place(self, name: str) -> str:
        """Return the place of a function; what is none is an op, whose name counts."""
        if name not in self._functions:
            return name
        return f"function {self._places.setdefault(name, len(self._places))}"

    def describe(self) -> list[Any]:
        """Return the functions that were placed, and those that they call."""
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


def _describe_node(node: Any, names: _Names, library: _Library) -> Any:
    attributes: Mapping[str, Any] = node.attr
    return (
        library.place(node.op),
        [names.place(name) for name in node.input],
        node.device,
        [
            (key, _describe_attribute(attributes[key], library))
            for key in sorted(attributes)
            if key not in _PROCESS_ATTRS and not key.startswith("_")
        ],
    )


def _describe_attribute(value: Any, library: _Library) -> Any:
    match value.WhichOneof("value"):
        case "func":
            return library.place(value.func.name)
        case "list" if value.list.func:
            return [library.place(each.name) for each in value.list.func]
        case _:
            serialised: bytes = value.SerializeToString(deterministic=True)
            is_long = len(serialised) > _MOST_BYTES
            return hashlib.sha256(serialised).digest() if is_long else serialised
