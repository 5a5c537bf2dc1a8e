"""Frozen weights in graphs: ops that name a `FrozenArray`, and the tensors they become.

Tracing writes an `ImmutableConst` whose memory region is the name of the array:

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
    """Return the tensor of a frozen array in the outermost graph being built."""
    with tf.init_scope():
        return tf.raw_ops.ImmutableConst(
            dtype=dtype, shape=shape, memory_region_name=name
        )


def named(graph_def: GraphDef) -> dict[str, str]:
    """Return the name of the array for each node that refers to one, by node name."""
    return {
        node.name: node.attr[_REGION].s.decode()
        for node in graph_def.node
        if node.op == "ImmutableConst"
        and node.attr[_REGION].s.startswith(frozen_arrays.PREFIX.encode())
    }


def take_out(graph_def: GraphDef) -> dict[str, Any]:
    """Replace the nodes of arrays by placeholders, in place.

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
    """Move the nodes of arrays to the outermost graph being built.

    Returns:
        The tensors to feed when the rest of the graph is imported, by name.
    """
    return {f"{name}:0": write(*about) for name, about in take_out(graph_def).items()}


def load(
    arrays: Iterable[tuple[str, tf.DType, Any]],
) -> list[tuple[FrozenArray, tf.Tensor]]:
    """Return arrays of this process with their tensors, on the current device.

    An array stays in the table of the process for as long as the caller keeps it.

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
    """Return a tensor in the memory of an array, which may be read-only.

    Memory without TensorFlow's alignment is copied.
    """
    address = content.__array_interface__["data"][0]
    if address % _ALIGNMENT:
        return tf.constant(content)
    # DLPack refuses read-only arrays, though no op writes to an input that is in use.
    about = {**content.__array_interface__, "data": (address, False)}
    writable: Any = np.asarray(SimpleNamespace(__array_interface__=about, of=content))
    return tf.experimental.dlpack.from_dlpack(writable.__dlpack__())
