"""The weights of layers that nobody trains: part of graphs, not of the state.

A pretrained base with `layer.trainable = False` is the same in every round, so neither
the server's state nor a client's update holds it. It is a constant of the graphs that
use it, which reach a worker once.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

import ray_fed.errors as errors

SEED_NAME = "seed_generator_state"
"""What Keras names the variable that a random layer draws from."""

_MAX_BYTES = 2**30
"""A graph, with all else in it, may have twice as many: a limit of protobuf."""


class FrozenWeights:
    """Those of a Keras model, as they are now.

    Args:
        keras_model: built; left as it is.

    Raises:
        ValueMismatchError: they are too many for a graph.
    """

    def __init__(self, keras_model: keras.Model) -> None:
        frozen = {id(v) for v in _variables_of_frozen_layers(keras_model)}
        variables = list(enumerate(keras_model.non_trainable_variables))
        self._paths = {i: v.path for i, v in variables if id(v) in frozen}
        self._values = {i: v.numpy() for i, v in variables if id(v) in frozen}
        self._constants: weakref.WeakKeyDictionary[Any, dict[int, Any]]
        self._constants = weakref.WeakKeyDictionary()
        if self.num_bytes > _MAX_BYTES:
            raise errors.ValueMismatchError(
                f"Expected layers that are not trained of up to {_MAX_BYTES} bytes,"
                f" found {self.num_bytes} bytes: store them with fewer bits, or train"
                " on what the base makes of the data."
            )

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(value.nbytes for value in self._values.values())

    def others(self, variables: Sequence[Any]) -> list[Any]:
        """Return what is not frozen of one thing for each non-trainable variable."""
        return [v for i, v in enumerate(variables) if i not in self._values]

    def fill(self, others: Sequence[Any]) -> list[Any]:
        """Return all non-trainable weights: the frozen ones as arrays in between."""
        return self._fill(others, self._values)

    def fill_traced(self, others: Sequence[Any]) -> list[Any]:
        """Return the same as tensors of the graph being traced."""
        return self._fill(others, self._traced())

    def check_kept(self, given: Sequence[Any], returned: Sequence[Any]) -> None:
        """Refuse a layer that writes to its frozen weights: that would be lost.

        Args:
            given: what `fill_traced` returned.
            returned: the same after a batch.

        Raises:
            ValueMismatchError: they differ; the message names the variables.
        """
        written = [
            path
            for index, path in self._paths.items()
            if returned[index] is not given[index]
        ]
        if written:
            raise errors.ValueMismatchError(
                f"Expected a layer with `trainable = False` to leave its variables as"
                f" they are, found that a batch changes {written}: train that layer, or"
                " have it look at `self.trainable` before it writes."
            )

    def _fill(self, others: Sequence[Any], frozen: dict[int, Any]) -> list[Any]:
        remaining = iter(others)
        count = len(others) + len(self._values)
        return [
            frozen[index] if index in frozen else next(remaining)
            for index in range(count)
        ]

    def _traced(self) -> dict[int, Any]:
        """Return tensors: one of each in the outermost graph, for all that it holds."""
        with tf.init_scope():
            graph = tf.compat.v1.get_default_graph()
            if tf.executing_eagerly():
                return {i: tf.constant(value) for i, value in self._values.items()}
            found = self._constants.get(graph)
            if found is None:
                found = {i: tf.constant(value) for i, value in self._values.items()}
                self._constants[graph] = found
            return found


def _variables_of_frozen_layers(layer: Any) -> Iterator[Any]:
    """Yield the variables of layers that are not trained, but for random seeds."""
    if not layer.trainable:
        for variable in cast("list[Any]", layer.variables):
            if variable.name != SEED_NAME:
                yield variable
        return
    for inner in getattr(layer, "layers", ()):
        yield from _variables_of_frozen_layers(inner)
