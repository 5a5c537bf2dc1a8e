"""Lets a traced function use tensors that were computed before: as constants.

TensorFlow captures such a tensor in a `tf.function`, and refuses it in the plain graph
that a computation is traced into. A computation is to run anywhere, so what it was
given is written into it. So is the content of a table that cannot change, such as the
vocabulary of a Keras layer.
"""

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context  # no public name

import ray_fed.errors as errors
from ray_fed.tensorflow.front.equality import TracedGraph
from ray_fed.tensorflow.front.replaced_methods import Method, ReplacedMethods

_TensorFlow: Any = tf.__internal__  # no public name
_EAGER: Any = next(
    cls for cls in _TensorFlow.EagerTensor.__mro__ if "__tf_tensor__" in vars(cls)
)
"""The class of eager tensors that converts them: found without making a tensor, which
would fix TensorFlow's threads."""


def _converting(original: Method) -> Method:
    """Return the conversion of an eager tensor to one of the graph of now."""

    def convert(tensor: Any, dtype: Any = None, name: str | None = None) -> Any:
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if isinstance(graph, TracedGraph):
                return graph.write_once(tensor, _write)
        return original(tensor, dtype, name)

    return convert


captured_as_constants = ReplacedMethods(
    {(_EAGER, "__tf_tensor__"): _converting}
).replaced
"""Has eager tensors written into every `TracedGraph` that uses them inside a block."""


def _write(tensor: Any) -> Any:
    """Return what stands for an eager tensor in the graph that is current.

    Raises:
        CompileError: it stands for something of this process, such as a dataset.
    """
    if tensor.dtype not in (tf.resource, tf.variant):
        return tf.constant(tensor.numpy())
    # TensorFlow lets a handle know the object that it is of; there is no public name.
    owner = getattr(tensor, "_parent_trackable", lambda: None)()
    if isinstance(owner, tf.lookup.StaticHashTable):
        return _write_table(owner)
    raise errors.CompileError(
        "Expected a computation to use tensors of values that it did not make, found"
        f" one of {tensor.dtype.name}, such as a dataset, a variable or a table that"
        " may change: make that inside of the computation, or pass it as an argument."
    )


def _write_table(table: Any) -> Any:
    """Return the handle of a table of the same content, in the graph that is current.

    The graph initialises it with its variables, before all that reads it.
    """
    with context.eager_mode():
        try:
            exported: Any = table.export()
        except tf.errors.OpError as error:
            raise errors.CompileError(
                "Expected a table that has its content, found one without: give its"
                " layer a vocabulary, or call `adapt`, before it is used here."
            ) from error
        keys, values = (tensor.numpy() for tensor in exported)
        default = table.default_value.numpy()
    order = np.argsort(keys)  # a table's own differs from process to process
    initializer = tf.lookup.KeyValueTensorInitializer(
        keys[order], values[order], table.key_dtype, table.value_dtype
    )
    return tf.lookup.StaticHashTable(initializer, default).resource_handle
