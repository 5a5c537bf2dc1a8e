"""Frozen weights in graphs: a graph refers to a large constant array by name.

Tracing writes an `ImmutableConst` op, which has the name of a `FrozenArray`. Loading
makes an input of it:

    ImmutableConst(ray_fed_frozen_0123...)   traced     no bytes in the graph
    Placeholder                              loaded     fed with the array's tensor

The tensor uses the memory of the array, which may be shared with other processes. It is
an input of the graph, so TensorFlow neither copies it nor folds it with other
constants, and loops do not load it again in each iteration.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ray_fed.tensorflow.graphs.graph_message import GraphDef
from ray_fed.values import frozen_arrays
from ray_fed.values.frozen_arrays import FrozenArray

_ALIGNMENT = 64
"""Alignment in bytes that TensorFlow's ops rely on."""

_REGION = "memory_region_name"


def write(name: str, dtype: tf.DType, shape: Any) -> tf.Tensor:
    """Return a tensor of the current outermost graph that stands for a frozen array."""
    with tf.init_scope():
        return tf.raw_ops.ImmutableConst(
            dtype=dtype, shape=shape, memory_region_name=name
        )


def named(graph_def: GraphDef) -> dict[str, str]:
    """Return the names of a graph's frozen arrays, by the node that refers to each."""
    return {
        node.name: node.attr[_REGION].s.decode()
        for node in graph_def.node
        if node.op == "ImmutableConst"
        and node.attr[_REGION].s.startswith(frozen_arrays.PREFIX.encode())
    }


def take_out(graph_def: GraphDef) -> dict[str, Any]:
    """Replace the nodes that refer to frozen arrays by placeholders, in place.

    Returns:
        For each placeholder, by name: the name of the array, its dtype and its shape.
    """
    names = named(graph_def)
    taken: dict[str, Any] = {}
    for node in graph_def.node:
        if node.name in names:
            dtype = tf.as_dtype(node.attr["dtype"].type)
            shape = tf.TensorShape(node.attr["shape"].shape)
            taken[node.name] = names[node.name], dtype, shape
            node.op = "Placeholder"
            del node.attr[_REGION]
    return taken


def write_all(graph_def: GraphDef) -> dict[str, tf.Tensor]:
    """Move the nodes that refer to frozen arrays to the current outermost graph.

    Returns:
        The tensors of the arrays, to feed when the rest of the graph is imported. The
        keys are the names of the fed tensors.
    """
    return {f"{name}:0": write(*about) for name, about in take_out(graph_def).items()}


def load(
    arrays: Iterable[tuple[str, tf.DType, Any]],
) -> list[tuple[FrozenArray, tf.Tensor]]:
    """Return frozen arrays with their tensors, on the current device.

    An array stays registered in this process for as long as the caller keeps it.

    Args:
        arrays: Name, dtype and shape of each array.

    Raises:
        ContextStateError: This process does not have one of the arrays.
    """
    loaded: list[tuple[FrozenArray, tf.Tensor]] = []
    for name, dtype, shape in arrays:
        array = frozen_arrays.get(name)
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        flat = tf.constant(array.content) if has_gpu else _alias(array.content)
        cells = flat if dtype.size == 1 else tf.reshape(flat, [-1, dtype.size])
        loaded.append((array, tf.reshape(tf.bitcast(cells, dtype), shape)))
    return loaded


def _alias(content: NDArray[np.uint8]) -> tf.Tensor:
    address = content.__array_interface__["data"][0]
    if address % _ALIGNMENT:
        return tf.constant(content)
    # DLPack refuses read-only arrays, though no op writes to an input that is in use.
    about = {**content.__array_interface__, "data": (address, False)}
    writable: Any = np.asarray(SimpleNamespace(__array_interface__=about, of=content))
    return tf.experimental.dlpack.from_dlpack(writable.__dlpack__())
