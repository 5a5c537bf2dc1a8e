"""A Keras optimiser inside of a graph that is being traced.

TensorFlow has no stateless form of Keras' optimisers: they update variables. So the
variables are made in the graph, given values, updated and read, in that order, which
holds inside of a `tf.function`.
"""

from collections.abc import Sequence
from typing import Any

import federated_language as fl
import keras
import tensorflow as tf

import ray_fed.errors as errors
from ray_fed.learning.checks import expect_object
from ray_fed.learning.models import Model


class OptimizerSpec:
    """What is needed to make an optimiser again: its class and its settings.

    Args:
        optimizer: of Keras; read now, and left as it is.

    Raises:
        ValueMismatchError: it is no optimiser of Keras, or one that scales losses.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        expect_object(
            optimizer, keras.optimizers.Optimizer, "keras.optimizers.SGD(0.1)"
        )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise errors.ValueMismatchError(
                "Expected an optimizer that takes gradients as they are, found a"
                " LossScaleOptimizer, which divides them by a factor that no loss is"
                " multiplied with here: pass its inner optimizer."
            )
        self._class = type(optimizer)
        self._config = optimizer.get_config()

    def stamp(self, model: Model) -> "StampedOptimizer":
        """Add the optimiser, and variables for a model's weights, to the current graph.

        Args:
            model: whose trainable weights it optimises, within their constraints.
        """
        weight_types: Any = model.weights_type
        return StampedOptimizer(
            self._class.from_config(self._config),
            list(weight_types.trainable),
            model.constraints,
        )


class StampedOptimizer:
    """An optimiser with variables of its own in one graph; see `OptimizerSpec.stamp`.

    Args:
        optimizer: not yet built; owned.
        weight_types: of the weights to optimise.
        constraints: of these, applied after each step; None: there is none.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        weight_types: Sequence[fl.TensorType],
        constraints: Sequence[Any],
    ) -> None:
        self._optimizer = optimizer
        self._weights = [
            keras.Variable("zeros", _shape_of(weight_type), weight_type.dtype)
            for weight_type in weight_types
        ]
        for weight, constraint in zip(self._weights, constraints, strict=True):
            weight.constraint = constraint
        optimizer.build(self._weights)

    def assign_weights(self, values: Sequence[Any]) -> None:
        """Give the weights values."""
        _assign(self._weights, values)

    def assign_state(self, values: Sequence[Any]) -> None:
        """Give the optimiser's own variables values, in the order of `read_state`."""
        _assign(self._optimizer.variables, values)

    def assign_rate(self, rate: Any) -> None:
        """Give the learning rate a value."""
        self._optimizer.learning_rate = rate

    def apply(self, gradients: Sequence[Any]) -> None:
        """Take one step against the gradients, one for each weight."""
        self._optimizer.apply(list(gradients), self._weights)

    def read_weights(self) -> tuple[tf.Tensor, ...]:
        """Return the weights as they are at this place of the graph."""
        return _read(self._weights)

    def read_state(self) -> tuple[tf.Tensor, ...]:
        """Return iteration, learning rate, moments and so on, as they are here."""
        return _read(self._optimizer.variables)


def _shape_of(weight_type: fl.TensorType) -> list[int]:
    return [size or 0 for size in weight_type.shape or ()]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.value.assign(value)


def _read(variables: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    return tuple(variable.value.read_value() for variable in variables)
