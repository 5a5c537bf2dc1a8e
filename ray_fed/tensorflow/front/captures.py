"""Lets a traced function use tensors that were computed before: as constants.

TensorFlow captures such a tensor in a `tf.function`, and refuses it in the plain graph
that a computation is traced into. A computation is to run anywhere, so what it was
given is written into it.
"""

from typing import Any

import tensorflow as tf

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
                _check_value(tensor)
                return graph.constant_of(tensor)
        return original(tensor, dtype, name)

    return convert


captured_as_constants = ReplacedMethods(
    {(_EAGER, "__tf_tensor__"): _converting}
).replaced
"""Has eager tensors written into every `TracedGraph` that uses them inside a block."""


def _check_value(tensor: Any) -> None:
    """Raise where a tensor stands for something of this process, as of a dataset."""
    if tensor.dtype in (tf.resource, tf.variant):
        raise errors.CompileError(
            "Expected a computation to use tensors of values that it did not"
            f" make, found one of {tensor.dtype.name}, such as a dataset or a"
            " table: make that inside of the computation, or pass it as an"
            " argument."
        )
