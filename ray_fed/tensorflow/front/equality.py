"""Lets `==` and `!=` compare elements while a function is traced.

TensorFlow compares tensors of a plain `tf.Graph` by identity, also inside of the
`tf.function`s and dataset functions in it: `x == 0` would be False, silently. So these
two operators are replaced while a function is traced, for tensors of the graph that
it is traced into; all other tensors keep TensorFlow's.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf


class TracedGraph(tf.Graph):
    """A graph in which tensors and variables are compared element by element."""

    def __init__(self) -> None:
        super().__init__()
        # By identity; holds the tensors, so that an id is not another's.
        self._constants: dict[int, tuple[Any, Any]] = {}

    def constant_of(self, tensor: Any) -> Any:
        """Return an eager tensor as a constant of this graph, the same each time."""
        if id(tensor) not in self._constants:
            with tf.control_dependencies(None):
                self._constants[id(tensor)] = tensor, tf.constant(tensor.numpy())
        return self._constants[id(tensor)][1]


_lock = threading.Lock()
_open_blocks = 0
_originals: dict[tuple[type[Any], str], Callable[[Any, Any], Any]] = {}


@contextlib.contextmanager
def compared_by_element() -> Generator[None]:
    """Compare tensors of every `TracedGraph` by element, in all threads."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _open_blocks  # noqa: PLW0603 (TensorFlow's classes are global too)
    with _lock:
        if not _open_blocks:
            for cls in (tf.Tensor, tf.Variable):
                _replace(cls, "__eq__", tf.raw_ops.Equal, when_none=False)
                _replace(cls, "__ne__", tf.raw_ops.NotEqual, when_none=True)
        _open_blocks += 1


def _leave() -> None:
    global _open_blocks  # noqa: PLW0603
    with _lock:
        _open_blocks -= 1
        if not _open_blocks:
            for (cls, name), original in _originals.items():
                setattr(cls, name, original)


def _replace(
    cls: type[Any], name: str, operation: Callable[..., Any], *, when_none: bool
) -> None:
    original = getattr(cls, name)

    def compare(self: Any, other: Any) -> Any:
        if not _is_traced(self) or _is_identity_meant():
            return original(self, other)
        if other is None:
            return when_none
        left = tf.convert_to_tensor(self)
        right = tf.convert_to_tensor(other, dtype_hint=left.dtype)
        return operation(x=left, y=right, incompatible_shape_error=False)

    _originals[cls, name] = original
    setattr(cls, name, compare)


def _is_identity_meant() -> bool:
    """Return whether TensorFlow's own code for variables compares, as in a v1 graph."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    caller = frame.f_globals["__name__"] if frame else ""
    return caller.startswith("tensorflow.python.ops.")


def _is_traced(value: Any) -> bool:
    try:
        graph = value.graph
    except AttributeError:  # an eager tensor
        return False
    while graph is not None and not isinstance(graph, TracedGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None
