"""Makes the iterations of loops and datasets that draw run one after another.

A random op takes its next numbers from a state that all iterations share, so that
their order decides who gets which.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ray_fed.tensorflow.graphs.protobufs import GraphDef, NodeDef

_PARALLEL_CALLS: Mapping[str, tuple[int, tf.DType]] = {
    "MapAndBatchDataset": (-2, tf.int64),
    "ParallelFilterDataset": (-1, tf.int64),
    "ParallelMapDataset": (-1, tf.int32),
    "ParallelMapDatasetV2": (-1, tf.int64),
}
"""By op that calls a function many times at once: which input says how many, and the
dtype of that."""


def run_in_order(graph_def: GraphDef, *, datasets: bool) -> None:
    """Rewrite a GraphDef in place so that nothing draws before its predecessor has.

    Args:
        graph_def: its library functions are rewritten too.
        datasets: whether functions of datasets draw.
    """
    bodies = (function.node_def for function in graph_def.library.function)
    for in_function, nodes in [(False, graph_def.node), *((True, b) for b in bodies)]:
        for node in list(nodes):
            if "parallel_iterations" in node.attr:
                node.attr["parallel_iterations"].i = 1
            if datasets and node.op in _PARALLEL_CALLS:
                _call_one_at_a_time(node, nodes, in_function=in_function)
            elif datasets and node.op.startswith("ParallelInterleaveDataset"):
                _interleave_in_order(node)


def _call_one_at_a_time(node: NodeDef, nodes: Any, *, in_function: bool) -> None:
    position, dtype = _PARALLEL_CALLS[node.op]
    one = nodes.add(name=f"{node.name}/ray_fed_one", op="Const", device=node.device)
    one.attr["dtype"].type = dtype.as_datatype_enum
    one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1, dtype))
    waits = sum(source.startswith("^") for source in node.input)
    source = f"{one.name}:output:0" if in_function else one.name
    node.input[len(node.input) - waits + position] = source


def _interleave_in_order(node: NodeDef) -> None:
    """Replace a parallel interleave by the one that reads in turn."""
    waits = [source for source in node.input if source.startswith("^")]
    kept = 3 + len(node.attr["Targuments"].list.type)  # up to the length of a block
    inputs = [*node.input[:kept], *waits]
    del node.input[:]
    node.input.extend(inputs)
    node.op = "InterleaveDataset"
    for attribute in ("deterministic", "sloppy"):
        if attribute in node.attr:
            del node.attr[attribute]
