"""Makes numbers of an algorithm, such as a learning rate, inputs of its graphs.

`traced_graph.Number` writes a number as a marked constant, behind an op that blocks
TensorFlow's constant folding. So the bits of a result do not depend on whether the
number is a constant or an input:

    Const(0.1, mark) -> PlaceholderWithDefault -> Cast -> ...

The value is not part of the hash of a graph (`identity.content_of`). Kernels take it as
an input, and a cached graph gets the numbers of each caller.
"""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
from ray_fed.language import blocks

MARK = "_ray_fed_number"
"""Attribute of a marked constant. The attribute's value, the mark, names the number."""


def read(message: Any) -> Iterator[tuple[int, float]]:
    """Yield the number's index and the value of each marked constant of a graph."""
    order: dict[bytes, int] = {}
    for mark, value in _marked(message):
        yield order.setdefault(mark, len(order)), value


def _marked(message: Any) -> Iterator[tuple[bytes, float]]:
    if MARK.encode() in message.graph_def.value:
        for node in graph_message.graph_of(message).node:
            if MARK in node.attr:
                yield node.attr[MARK].s, _value_of(node)


def marks_of(graph_def: Any) -> dict[str, bytes]:
    """Return the marks of a graph's constants, by the name of their node."""
    return {n.name: n.attr[MARK].s for n in graph_def.node if MARK in n.attr}


def rewrite(proto: Any, change: Callable[[bytes, float], tuple[bytes, float]]) -> None:
    """Change all marked constants of a `pb.Computation`, in place.

    `change` maps the mark and the value of a constant to its new mark and value.
    """
    for message in graph_message.messages_of(proto):
        if MARK.encode() not in message.graph_def.value:
            continue
        graph_def = tf.compat.v1.GraphDef()
        message.graph_def.Unpack(graph_def)
        for node in graph_def.node:
            if MARK in node.attr:
                mark, value = change(node.attr[MARK].s, _value_of(node))
                node.attr[MARK].s = mark
                tensor = tf.make_tensor_proto(value, tf.float64, [])
                node.attr["value"].tensor.CopyFrom(tensor)
        message.graph_def.Pack(graph_def, deterministic=True)


def _value_of(node: Any) -> float:
    return float(tf.make_ndarray(node.attr["value"].tensor))


def take_out(*functions: bytes) -> tuple[list[bytes], list[float]]:
    """Return serialized functions without the values of their numbers, and the values.

    The mark of each constant becomes the index of its value in the second result. The
    constant becomes NaN, so that a missing number shows in results.
    """
    numbers: dict[bytes, float] = {}

    def change(mark: bytes, value: float) -> tuple[bytes, float]:
        numbers.setdefault(mark, value)
        return str(list(numbers).index(mark)).encode(), float("nan")

    return [_rewritten(each, change) for each in functions], list(numbers.values())


def _rewritten(function: bytes, change: Any) -> bytes:
    if MARK.encode() not in function:
        return function
    proto = blocks.parse_block(function).to_proto()
    rewrite(proto, change)
    return proto.SerializeToString(deterministic=True)
