"""The weights of layers that nobody trains: part of graphs, not of the state.

A pretrained base with `layer.trainable = False` is the same in every round, so neither
the server's state nor a client's update holds it. It is a constant of the graphs that
use it, which reach a worker once.
"""

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
        # Tensors: a graph that uses one has it as a constant, once.
        self._values = {
            i: tf.constant(v.numpy()) for i, v in variables if id(v) in frozen
        }
        if self.num_bytes > _MAX_BYTES:
            raise errors.ValueMismatchError(
                f"Expected layers that are not trained of up to {_MAX_BYTES} bytes,"
                f" found {self.num_bytes} bytes: store them with fewer bits, or train"
                " on what the base makes of the data."
            )

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(value.numpy().nbytes for value in self._values.values())

    def others(self, variables: Sequence[Any]) -> list[Any]:
        """Return what is not frozen of one thing for each non-trainable variable."""
        return [v for i, v in enumerate(variables) if i not in self._values]

    def fill(self, others: Sequence[Any]) -> list[Any]:
        """Return all non-trainable weights, the frozen ones in between."""
        remaining = iter(others)
        count = len(others) + len(self._values)
        return [
            self._values[index] if index in self._values else next(remaining)
            for index in range(count)
        ]

    def fill_traced(self, others: Sequence[Any]) -> list[Any]:
        """Return the same as tensors of the graph being traced."""
        return [tf.convert_to_tensor(value) for value in self.fill(others)]

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


def _variables_of_frozen_layers(layer: Any) -> Iterator[Any]:
    """Yield the variables of layers that are not trained, but for random seeds."""
    if not layer.trainable:
        for variable in cast("list[Any]", layer.variables):
            if variable.name != SEED_NAME:
                yield variable
        return
    for inner in getattr(layer, "layers", ()):
        yield from _variables_of_frozen_layers(inner)
