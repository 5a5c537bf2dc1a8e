"""The graph that a computation is traced into, and code that acts differently in it.

Threads share the classes and modules of other packages. So a function that replaces one
of theirs looks at the current graph. It does the same as the original function unless
that graph belongs to a computation that is being traced.

If a traced function reads a `Number` or a large `Constant`, the value is an input of
its graph. So functions that differ only in such values can share a graph.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from ray_fed.tensorflow.graphs import frozen_weights, numbers
from ray_fed.values.frozen_arrays import FrozenArray

Method: TypeAlias = Callable[..., Any]


class Replacements:
    """Replaces attributes of classes and modules during `with` blocks.

    `replacements` maps each attribute, as its owner and name, to a function from the
    original value to the new value.
    """

    def __init__(
        self, replacements: Mapping[tuple[Any, str], Callable[[Any], Any]]
    ) -> None:
        self._replacements = replacements
        self._originals: dict[tuple[Any, str], Any] = {}
        self._lock = threading.Lock()
        self._open_blocks = 0

    @contextlib.contextmanager
    def replaced(self) -> Generator[None]:
        """Replace the attributes, for all threads, until the last open block ends."""
        with self._lock:
            if not self._open_blocks:
                for (owner, name), make in self._replacements.items():
                    original = self._originals[owner, name] = getattr(owner, name)
                    setattr(owner, name, make(original))
            self._open_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._open_blocks -= 1
                if not self._open_blocks:
                    for (owner, name), original in self._originals.items():
                        setattr(owner, name, original)


class TracedGraph(tf.Graph):
    """The graph of a computation while its Python function is traced.

    `num_default_seeds` counts the random generators of Keras without a seed in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_default_seeds = 0
        # By id. The objects stay alive, so that no other object gets their ids.
        self._written: dict[int, tuple[Any, Any]] = {}

    def write_once(self, value: Any, write: Callable[[Any], Any]) -> Any:
        """Return the replacement in this graph of an object from outside of the graph.

        An example is an eager tensor. In the first call for an object, `write` adds the
        replacement to the graph. Later calls return the same replacement.
        """
        if id(value) not in self._written:
            with tf.init_scope():
                self._written[id(value)] = value, write(value)
        return self._written[id(value)][1]


def traced_graph(graph: Any) -> TracedGraph | None:
    """Return the `TracedGraph` that a graph is, or is inside of, or None."""
    while graph is not None and not isinstance(graph, TracedGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph


def current_graph() -> TracedGraph | None:
    """Return the graph of the computation that this thread traces, or None."""
    if tf.executing_eagerly():
        return None
    return traced_graph(tf.compat.v1.get_default_graph())


_MARKS = itertools.count()


class Number:
    """A number, such as a learning rate, that graphs take as an input.

    Graphs that differ in the values of numbers only are traced and cached once. A
    traced function calls `read` instead of using `value`. `mark` identifies the number
    in graphs (`ray_fed.tensorflow.graphs.numbers`).
    """

    def __init__(self, value: float) -> None:
        self.value = float(value)
        self.mark = str(next(_MARKS)).encode()

    def read(self, dtype: Any) -> tf.Tensor:
        """Return the number as a scalar of a dtype, in the current graph."""
        graph = current_graph()
        if graph is None:
            return tf.constant(self.value, dtype)
        return tf.cast(graph.write_once(self, Number._write), dtype)

    def _write(self) -> tf.Tensor:
        constant = tf.constant(self.value, tf.float64)
        mark = tf.compat.v1.AttrValue(s=self.mark)
        constant.op._set_attr(numbers.MARK, mark)  # noqa: SLF001 (no public name)
        return tf.compat.v1.placeholder_with_default(constant, [])


_FROZEN_BYTES = 2**16
"""Minimum bytes of a constant that graphs refer to by name."""


class Constant:
    """A value that many graphs use. Graphs refer to a large value by name.

    Args:
        tensor: The value, an eager tensor.

    Attributes:
        tensor: The value.
        digest: A hash of the value, its dtype and its shape.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        # On a CPU, this is a view of the tensor's memory.
        array = FrozenArray.of(np.ascontiguousarray(tensor._numpy()))  # noqa: SLF001
        self.digest = array.name
        is_numeric = tensor.dtype.is_floating or tensor.dtype.is_integer
        is_large = array.content.nbytes >= _FROZEN_BYTES
        self._array = array if is_numeric and is_large else None

    def read(self) -> tf.Tensor:
        """Return the value as a tensor of the current graph."""
        graph = current_graph()
        if graph is None or self._array is None:
            return tf.convert_to_tensor(self.tensor)
        return graph.write_once(self, Constant._write)

    def _write(self) -> tf.Tensor:
        return frozen_weights.write(self.digest, self.tensor.dtype, self.tensor.shape)
