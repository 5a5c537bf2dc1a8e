"""Lets `==` and `!=` compare elements while a function is traced.

TensorFlow compares tensors of a plain `tf.Graph` by identity, also inside of the
`tf.function`s and dataset functions in it: `x == 0` would be False, silently. So these
two operators are replaced while a function is traced, for tensors of the graph that
it is traced into; all other tensors keep TensorFlow's.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ray_fed.tensorflow.front.replaced_methods import Method, ReplacedMethods


class TracedGraph(tf.Graph):
    """A graph in which tensors and variables are compared element by element."""

    def __init__(self) -> None:
        super().__init__()
        # By identity; holds the tensors, so that an id is not another's.
        self._written: dict[int, tuple[Any, Any]] = {}

    def write_once(self, tensor: Any, write: Callable[[Any], Any]) -> Any:
        """Return what an eager tensor is in this graph, the same each time.

        Args:
            tensor: the eager one.
            write: returns a tensor of this graph that stands for it.
        """
        if id(tensor) not in self._written:
            with tf.control_dependencies(None):
                self._written[id(tensor)] = tensor, write(tensor)
        return self._written[id(tensor)][1]


def _comparing(operation: Method, *, when_none: bool) -> Callable[[Method], Method]:
    """Return what makes a comparison of elements of one of identities."""

    def make(original: Method) -> Method:
        def compare(self: Any, other: Any) -> Any:
            if not _is_traced(self) or _is_identity_meant():
                return original(self, other)
            if other is None:
                return when_none
            left = tf.convert_to_tensor(self)
            right = tf.convert_to_tensor(other, dtype_hint=left.dtype)
            return operation(x=left, y=right, incompatible_shape_error=False)

        return compare

    return make


_EQUAL = _comparing(tf.raw_ops.Equal, when_none=False)
_NOT_EQUAL = _comparing(tf.raw_ops.NotEqual, when_none=True)

compared_by_element = ReplacedMethods(
    {
        (tf.Tensor, "__eq__"): _EQUAL,
        (tf.Tensor, "__ne__"): _NOT_EQUAL,
        (tf.Variable, "__eq__"): _EQUAL,
        (tf.Variable, "__ne__"): _NOT_EQUAL,
    }
).replaced
"""Has tensors of every `TracedGraph` compared by element inside a block."""


def _is_identity_meant() -> bool:
    """Return whether TensorFlow's own code compares, that for variables and graphs."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    caller = frame.f_globals["__name__"] if frame else ""
    return caller.startswith(("tensorflow.python.ops.", "tensorflow.python.framework."))


def _is_traced(value: Any) -> bool:
    try:
        graph = value.graph
    except AttributeError:  # an eager tensor
        return False
    while graph is not None and not isinstance(graph, TracedGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None
