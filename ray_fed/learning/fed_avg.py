"""Federated averaging, with an optimiser at the server.

One round, on a cohort of clients k with n_k examples each:

    server state --broadcast--> w_k = local training from w       (client optimiser)
                                delta_k = w_k - w
    sum_k n_k delta_k / sum_k n_k --> minus the gradient of w      (server optimiser)

With SGD at rate 1 at the server this is the average of the clients' weights. The sign
of delta is that of Reddi et al.; their server step is Algorithm 1 with weights n_k.

Sources:
    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS
    2017, PMLR 54:1273-1282, https://arxiv.org/abs/1602.05629, Algorithm 1.

    Sashank J. Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub
    Konečný, Sanjiv Kumar, H. Brendan McMahan: Adaptive Federated Optimization. ICLR
    2021, https://arxiv.org/abs/2003.00295, Algorithms 1 and 2.
"""

from typing import Any, NamedTuple

import federated_language as fl
import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

import ray_fed.errors as errors
from ray_fed import tensorflow as rtf
from ray_fed.learning.local_training import (
    Broadcast,
    Delta,
    build_client_update,
    trainable_types,
)
from ray_fed.learning.models import Model, ModelWeights
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import LearningProcess


class ServerState(NamedTuple):
    """What the server keeps between rounds: numpy arrays where `next` returns it.

    Attributes:
        weights: of the model.
        optimizer: variables of the server's optimiser, in its own order.
        round_index: i32[], rounds done so far.
    """

    weights: ModelWeights
    optimizer: tuple[Any, ...]
    round_index: Any

    @override
    def __repr__(self) -> str:
        after = f"<server state after {self.round_index} rounds"
        return f"{after}: {self.weights!r}, {len(self.optimizer)} of the optimizer>"


def build_fed_avg(
    model: Model,
    client_optimizer: keras.optimizers.Optimizer,
    server_optimizer: keras.optimizers.Optimizer | None = None,
    *,
    epochs: int = 1,
) -> LearningProcess:
    """Build federated averaging, weighted by the clients' numbers of examples.

    The process holds

        initialize   ( -> ServerState@SERVER), with the Keras model's weights of now
        next         (<ServerState@SERVER, model.data_type> ->
                      <ServerState@SERVER, metrics@SERVER>)

    Metrics are those of the clients' training, each batch measured before its step:
    loss, num_examples (passes times examples), and the model's own. Non-trainable
    weights that are floats are averaged like the others; seeds stay at the server's,
    and are mixed with round and data at the client. A round without any example moves
    no weight by itself.

    Args:
        model: to train.
        client_optimizer: read now; each client starts with a fresh one.
        server_optimizer: read now; takes the average delta as minus the gradient. Its
            variables are part of the state. By default SGD with rate 1.
        epochs: passes of each client over its data in a round, >= 1.

    Raises:
        ValueMismatchError: an optimiser is not one of Keras.
        ConfigError: `epochs` is below 1.
    """
    if epochs < 1:
        raise errors.ConfigError(f"Expected `epochs` to be at least 1, found {epochs}.")
    at_client = OptimizerSpec(client_optimizer)
    at_server = OptimizerSpec(server_optimizer or keras.optimizers.SGD(1.0))
    initialize_server = _build_initialize(model, at_server)
    state_type = initialize_server.type_signature.result
    update_client = build_client_update(model, at_client, epochs)
    update_type = update_client.type_signature.result
    update_server = _build_server_update(model, at_server, state_type, update_type)

    @rtf.computation(state_type)
    def prepare(state: ServerState) -> Broadcast:
        return Broadcast(state.weights, state.round_index)

    @rtf.computation(update_type.totals)
    def report(totals: Any) -> Any:
        return model.totals.finish(totals)

    @fl.federated_computation
    def initialize() -> Any:
        return fl.federated_eval(initialize_server, fl.SERVER)

    @fl.federated_computation(fl.FederatedType(state_type, fl.SERVER), model.data_type)
    def run_round(state: Any, data: Any) -> Any:
        broadcast = fl.federated_broadcast(fl.federated_map(prepare, state))
        updates = fl.federated_map(update_client, (broadcast, data))
        delta = fl.federated_mean(updates.delta, weight=updates.weight)
        totals = fl.federated_sum(updates.totals)
        new_state = fl.federated_map(update_server, (state, delta, totals))
        return new_state, fl.federated_map(report, totals)

    return LearningProcess(initialize, run_round)


def _build_initialize(model: Model, optimizer: OptimizerSpec) -> Any:
    initial = model.initial_weights()

    @rtf.computation
    def initialize() -> ServerState:
        stamped = optimizer.stamp(trainable_types(model))
        weights = ModelWeights(
            tuple(tf.constant(value) for value in initial.trainable),
            tuple(tf.constant(value) for value in initial.non_trainable),
        )
        return ServerState(weights, stamped.read_state(), tf.constant(0))

    return initialize


def _build_server_update(
    model: Model, optimizer: OptimizerSpec, state_type: fl.Type, update_type: Any
) -> Any:
    @rtf.computation(state_type, update_type.delta, update_type.totals)
    def update(state: ServerState, delta: Delta, totals: Any) -> ServerState:
        stamped = optimizer.stamp(trainable_types(model))
        # The mean over no examples is not a number.
        counts = totals.num_examples > 0
        moves = [tf.where(counts, d, tf.zeros_like(d)) for d in delta.trainable]
        drifts = [tf.where(counts, d, tf.zeros_like(d)) for d in delta.statistics]

        @tf.function(autograph=False)
        def step() -> tuple[Any, Any]:
            stamped.assign_weights(state.weights.trainable)
            stamped.assign_state(state.optimizer)
            stamped.apply([-move for move in moves])
            return stamped.read_weights(), stamped.read_state()

        trainable, variables = step()
        non_trainable = list(state.weights.non_trainable)
        for index, drift in zip(model.statistics_indices, drifts, strict=True):
            non_trainable[index] += drift
        weights = ModelWeights(trainable, tuple(non_trainable))
        return ServerState(weights, variables, state.round_index + np.int32(1))

    return update
