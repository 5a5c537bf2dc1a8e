"""The body of a graph or of a library function, in one notation.

A GraphDef names the output of a node `node:1`, a FunctionDef `node:name:0`. A `Body` is
written as the former, with its arguments and results by name.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tensorflow.python.framework import op_def_registry  # no public name

from ray_fed.tensorflow.graphs import graph_message, randomness
from ray_fed.tensorflow.graphs.protobufs import (
    FunctionDef,
    GraphDef,
    NodeDef,
    TensorFlowMessage,
)


class CannotLower(Exception):  # noqa: N818 (says what is so; never leaves the package)
    """The computation runs as it was written.

    Args:
        reason: a few words: an op, or what about it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Body:
    """Nodes with what goes in and what comes out.

    Attributes:
        nodes: by name; arguments are none of them.
        arguments: names of tensors.
        results: names of tensors.
        last: names of nodes that must have run when the body has.
    """

    nodes: Mapping[str, NodeDef]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    last: tuple[str, ...] = ()


def node_of(source: str) -> str:
    """Return the name of the node that an input comes from."""
    return source.removeprefix("^").split(":")[0]


def tensor_of(source: str) -> str:
    """Return an input that is a tensor with its number written out."""
    return source if ":" in source else f"{source}:0"


def of_graph(
    graph_def: GraphDef,
    arguments: Sequence[str],
    results: Sequence[str],
    last: Sequence[str],
) -> Body:
    """Return the body that the nodes of a graph are."""
    fed = {node_of(name) for name in arguments}
    nodes = {node.name: node for node in graph_def.node if node.name not in fed}
    return Body(
        nodes,
        tuple(map(tensor_of, arguments)),
        tuple(map(tensor_of, results)),
        tuple(map(node_of, last)),
    )


def of_function(function: FunctionDef) -> Body:
    """Return the body of a FunctionDef."""
    arguments = [argument.name for argument in function.signature.input_arg]
    flat = {name: f"{name}:0" for name in arguments}
    for node in function.node_def:
        for index, name in enumerate(_output_names(node)):
            flat[f"{node.name}:{name}"] = f"{node.name}:{index}"
    nodes: dict[str, NodeDef] = {}
    for node in function.node_def:
        copied = type(node)()
        copied.CopyFrom(node)
        del copied.input[:]
        copied.input.extend(
            source if source.startswith("^") else flat[source] for source in node.input
        )
        nodes[node.name] = copied
    outputs = function.signature.output_arg
    return Body(
        nodes,
        tuple(flat[name] for name in arguments),
        tuple(flat[function.ret[output.name]] for output in outputs),
        tuple(function.control_ret.values()),
    )


def _output_names(node: NodeDef) -> Iterator[str]:
    definition = definition_of(node)
    for output in definition.output_arg:
        count = 1
        if output.number_attr:
            count = node.attr[output.number_attr].i
        elif output.type_list_attr:
            count = len(node.attr[output.type_list_attr].list.type)
        for index in range(count):
            yield f"{output.name}:{index}"


def definition_of(node: NodeDef) -> Any:
    """Return the OpDef of a node."""
    definition = op_def_registry.get(node.op)
    if definition is None:
        raise CannotLower(node.op)
    return definition


def functions_of(node: NodeDef) -> Iterator[str]:
    """Yield the names of the functions that a node calls."""
    for _, value in sorted(node.attr.items()):
        if value.HasField("func"):
            yield value.func.name
        for function in value.list.func:
            yield function.name


def needed(nodes: Mapping[str, NodeDef], roots: Iterable[str]) -> list[str]:
    """Return the names of the nodes that roots wait for, each after its inputs.

    Raises:
        CannotLower: the nodes are in a loop of TensorFlow 1.
    """
    ordered: dict[str, None] = {}
    entered: set[str] = set()
    pending = [(name, False) for name in reversed(list(roots)) if name in nodes]
    while pending:
        name, is_done = pending.pop()
        if is_done:
            ordered[name] = None
            continue
        if name in entered:
            continue
        entered.add(name)
        if nodes[name].op == "NextIteration":
            raise CannotLower("NextIteration")
        pending.append((name, True))
        pending.extend(
            (source, False)
            for source in reversed([node_of(s) for s in nodes[name].input])
            if source in nodes and source not in entered
        )
    return list(ordered)


_CALLS = frozenset(
    {"Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While", "Placeholder"}
)
"""Stateful to TensorFlow for what they may call, which is looked at by itself."""


def stateful_ops(graph_def: GraphDef) -> list[str]:
    """Return the kinds of ops of a graph that have state or effects, in order."""
    inside = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    return [
        str(node.op)
        for nodes in inside
        for node in nodes
        if node.op not in _CALLS and definition_of(node).is_stateful
    ]


def find_effects(message: TensorFlowMessage) -> str | None:
    """Return what makes two calls of a computation differ, in a few words, or None."""
    graph_def = graph_message.graph_of(message)
    if stateful := stateful_ops(graph_def):
        return stateful[0]
    states = randomness.key_random_ops(graph_def)
    return "a random op" if states.names or states.unkeyed else None
