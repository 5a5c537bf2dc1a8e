"""Lets a traced function use tensors that were computed before: as constants.

TensorFlow captures such a tensor in a `tf.function`, and refuses it in the plain graph
that a computation is traced into. A computation is to run anywhere, so what it was
given is written into it.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.tensorflow.front.equality import TracedGraph

_TensorFlow: Any = tf.__internal__  # no public name
_EAGER: Any = next(
    cls for cls in _TensorFlow.EagerTensor.__mro__ if "__tf_tensor__" in vars(cls)
)
"""The class of eager tensors that converts them: found without making a tensor, which
would fix TensorFlow's threads."""

_lock = threading.Lock()
_open_blocks = 0
_original: Callable[..., Any] = _EAGER.__tf_tensor__


@contextlib.contextmanager
def captured_as_constants() -> Generator[None]:
    """Write eager tensors into every `TracedGraph` that uses them, in all threads."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _open_blocks  # noqa: PLW0603 (TensorFlow's class is global too)
    with _lock:
        _open_blocks += change
        _EAGER.__tf_tensor__ = _convert if _open_blocks else _original


def _convert(tensor: Any, dtype: Any = None, name: str | None = None) -> Any:
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        if isinstance(graph, TracedGraph):
            if _is_handle(tensor):
                raise errors.CompileError(
                    "Expected a computation to use tensors of values that it did not"
                    f" make, found one of {tensor.dtype.name}, such as a dataset or a"
                    " table: make that inside of the computation, or pass it as an"
                    " argument."
                )
            return graph.constant_of(tensor)
    return _original(tensor, dtype, name)


def _is_handle(tensor: Any) -> bool:
    """Return whether a tensor stands for something of this process, as datasets do."""
    return tensor.dtype in (tf.resource, tf.variant)
