"""Replaces ops that TensorFlow refuses on a GPU, as their bits would differ by the run.

TensorFlow's own Python functions write other ops if determinism is on as they are
traced. Graphs are traced in a driver, where it is off, and run on CPUs as they are.

    SparseSoftmaxCrossEntropyWithLogits    ->    softmaxes, sums and products, then
    SoftmaxCrossEntropyWithLogits                IdentityN(loss, backprop)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config  # no public name

from ray_fed.tensorflow.graphs.graph_message import FunctionDef, GraphDef, NodeDef

_OUTPUTS = ("loss", "backprop")


def use_deterministic_ops(graph_def: GraphDef) -> None:
    """Rewrite a GraphDef in place, library functions included, where determinism is on.

    The results are the same up to rounding. A label that is none of the classes has
    NaNs, as by TensorFlow on a GPU.
    """
    if not config.is_op_determinism_enabled():
        return
    for node in list(graph_def.node):
        if node.op in _WRITTEN:
            _replace(node, graph_def.node, _traced(node).in_graph)
    for function in graph_def.library.function:
        _replace_in(function)


def _replace_in(function: FunctionDef) -> None:
    renamed: dict[str, str] = {}
    for node in list(function.node_def):
        if node.op in _WRITTEN:
            _replace(node, function.node_def, _traced(node).in_function)
            for index, output in enumerate(_OUTPUTS):
                renamed[f"{node.name}:{output}:0"] = f"{node.name}:output:{index}"
    if not renamed:
        return
    for node in function.node_def:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for result, name in function.ret.items():
        function.ret[result] = renamed.get(name, name)


def _of_classes(features: Any, labels: Any) -> tuple[Any, Any]:
    """Return loss and backprop where one class is the label."""
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
    """Return loss and backprop where each class has a probability."""
    loss = -tf.reduce_sum(labels * tf.nn.log_softmax(features), 1)
    return loss, tf.nn.softmax(features) - labels


_WRITTEN: Mapping[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "SparseSoftmaxCrossEntropyWithLogits": _of_classes,
    "SoftmaxCrossEntropyWithLogits": _of_probabilities,
}


class _Traced:
    """Ops in place of one, as nodes of a graph and of a function.

    Args:
        op: the one.
        features: dtype.
        labels: dtype.

    Attributes:
        in_graph: nodes, names of the two arguments, names of the two results.
        in_function: the same.
    """

    def __init__(self, op: str, features: tf.DType, labels: tf.DType) -> None:
        rank = 1 if _WRITTEN[op] is _of_classes else 2
        specs = [
            tf.TensorSpec([None] * r, d) for r, d in ((2, features), (rank, labels))
        ]
        with tf.init_scope(), tf.device(None):
            found: Any = tf.function(_WRITTEN[op]).get_concrete_function(*specs)
        arguments = [tensor.op.name for tensor in found.inputs]
        nodes = [n for n in found.graph.as_graph_def().node if n.name not in arguments]
        results = [tensor.name.removesuffix(":0") for tensor in found.outputs]
        self.in_graph = nodes, arguments, results
        written = found.function_def
        self.in_function = (
            list(written.node_def),
            [argument.name for argument in written.signature.input_arg],
            [written.ret[result.name] for result in written.signature.output_arg],
        )


@functools.cache
def _trace(op: str, features: int, labels: int) -> _Traced:
    return _Traced(op, tf.as_dtype(features), tf.as_dtype(labels))


def _traced(node: NodeDef) -> _Traced:
    features = node.attr["T"].type
    labels = node.attr["Tlabels"].type if "Tlabels" in node.attr else features
    return _trace(node.op, features, labels)


def _replace(
    node: NodeDef, nodes: Any, by: tuple[list[NodeDef], list[str], list[str]]
) -> None:
    """Add the ops in place of a node, which then hands on what they come to."""
    written, arguments, results = by
    features, labels, *waits = node.input
    given = dict(zip(arguments, (features, labels), strict=True))
    prefix = f"{node.name}/ray_fed_"

    def of(name: str) -> str:
        return given[name] if name in given else prefix + name

    for one in written:
        added = nodes.add()
        added.CopyFrom(one)
        added.name = prefix + one.name
        added.device = node.device
        added.input[:] = [of(name) for name in one.input]
    dtype = node.attr["T"].type
    for attribute in ("T", "Tlabels"):
        if attribute in node.attr:
            del node.attr[attribute]
    node.op = "IdentityN"
    node.input[:] = [*map(of, results), *waits]
    node.attr["T"].list.type.extend([dtype] * len(results))
