"""The server's step: an optimiser of Keras takes the clients' average as a gradient."""

from typing import Any

import federated_language as fl
import numpy as np
import tensorflow as tf

from ray_fed import tensorflow as rtf
from ray_fed.learning.local_training import Delta, as_float
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import Part


def build_server_update(model: Model, optimizer: OptimizerSpec) -> Part:
    """Return the part that gives Delta to an optimiser as minus the gradient.

    Its state is the optimiser's variables, in their own order.
    """
    optimizer.refuse(
        "at the server",
        use_ema="its averages replace the weights at the end of training, which a"
        " process does not know",
    )
    initial_variables = build_initial_variables(model, optimizer)
    variables_type = initial_variables.type_signature.result

    @rtf.computation(variables_type, model.weights_type, delta_type(model))
    def update(variables: Any, weights: ModelWeights, delta: Delta) -> Any:
        stamped = optimizer.stamp(model)

        @tf.function(autograph=False)
        def step() -> tuple[Any, Any]:
            stamped.assign_weights(weights.trainable)
            stamped.assign_state(variables)
            stamped.apply([stamped.scale_loss(-move) for move in delta.trainable])
            return stamped.read_weights(), stamped.read_state()

        trainable, new_variables = step()
        return new_variables, ModelWeights(
            trainable, add_statistics(model, weights, delta)
        )

    return build_server_part(initial_variables, update)


def build_initial_variables(model: Model, optimizer: OptimizerSpec) -> Any:
    """Return the computation of an optimiser's variables before any round."""
    values = optimizer.initial_state(model)

    @rtf.computation
    def initial_variables() -> tuple[Any, ...]:
        return tuple(tf.constant(value) for value in values)

    return initial_variables


def build_server_part(initial: Any, update: Any) -> Part:
    """Return a part that holds its state and changes the weights at the server.

    Args:
        initial: ( -> S), the state before any round.
        update: (<S, weights, U> -> <S, weights>), one round.
    """
    types = [part for _, part in update.type_signature.parameter.items()]

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(initial, fl.SERVER)

    @fl.federated_computation(*(fl.FederatedType(t, fl.SERVER) for t in types))
    def finalize(state: Any, weights: Any, merged: Any) -> Any:
        ended = fl.federated_map(update, (state, weights, merged))
        return ended[0], ended[1]

    return Part(initialize, finalize)


def delta_type(model: Model) -> Any:
    """Return the type of the Delta of a model's weights."""
    weights_type: Any = model.weights_type
    statistics = [weights_type.non_trainable[i] for i in model.statistics_indices]
    members: Any = (
        tuple(weights_type.trainable),
        tuple(
            fl.TensorType(t.dtype if _is_float(t) else np.float32, t.shape)
            for t in statistics
        ),
    )
    return fl.to_type(Delta(*members))


def _is_float(tensor_type: Any) -> bool:
    return tf.as_dtype(tensor_type.dtype).is_floating


def add_statistics(
    model: Model, weights: ModelWeights, delta: Delta
) -> tuple[Any, ...]:
    """Return the weights that are not trained, moved by a delta of those averaged."""
    non_trainable = list(weights.non_trainable)
    for index, drift in zip(model.statistics_indices, delta.statistics, strict=True):
        before = non_trainable[index]
        if before.dtype.is_floating:
            non_trainable[index] = before + drift
        else:  # counters: the nearest whole number, which one client has exactly
            moved = as_float(before) + drift
            non_trainable[index] = tf.cast(tf.round(moved), before.dtype)
    return tuple(non_trainable)
