"""Federated stochastic gradient descent: clients send gradients, the server steps.

    g_k = grad F_k(w_t),   w_{t+1} = w_t - eta sum_k n_k / n g_k

Sources:
    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS
    2017, PMLR 54:1273-1282, https://arxiv.org/abs/1602.05629, Section 2 (FedSGD).
"""

from typing import Any

import keras
import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed import tensorflow as rtf
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.aggregators.sums import inner_or_mean
from ray_fed.learning.composition import build_process
from ray_fed.learning.full_gradients import full_gradient
from ray_fed.learning.guards import Guards
from ray_fed.learning.local_training import (
    Broadcast,
    Delta,
    broadcast_type,
    measure_statistics,
    send_weights,
    stateless_client_part,
)
from ray_fed.learning.models import Model, expect_model
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import LearningProcess, with_facts
from ray_fed.learning.round_values import ClientResult, Measured
from ray_fed.learning.server_update import build_server_update


@tracebacks.shorten
def build_fed_sgd(
    model: Model,
    server_optimizer: keras.optimizers.Optimizer | str,
    *,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedSGD: the gradient of each client over all of its data, one step a round.

    Running statistics of layers are averaged over clients, each after its own batches.

    Args:
        model: to train.
        server_optimizer: of Keras, an object or a name, copied now; takes the mean of
            the gradients.
        aggregator: how gradients become one, by default their mean, weighted by the
            clients' numbers of examples.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: the optimiser is not one of Keras, or has a setting that
            cannot mean here what it does in `fit`; it is named.
    """
    expect_model(model)
    server = OptimizerSpec(server_optimizer)
    finalize = build_server_update(model, server)

    @rtf.computation(broadcast_type(model), model.data_type.member)
    def compute_gradient(broadcast: Broadcast, dataset: Any) -> ClientResult:
        weights = broadcast.weights
        gradient = full_gradient(model, weights, dataset)
        # `build_server_update` takes minus the gradient.
        minus = tuple(-part for part in gradient.trainable)
        statistics = measure_statistics(model, weights, gradient)
        totals = gradient.totals
        weight = tf.cast(totals.num_examples, tf.float32)
        return ClientResult(Delta(minus, statistics), weight, Measured(totals, ()))

    process = build_process(
        model,
        distribute=send_weights(model, finalize),
        client_work=stateless_client_part(compute_gradient),
        aggregate=inner_or_mean(aggregator),
        finalize=finalize,
        guards=guards,
    )
    return with_facts(process, algorithm="FedSGD", server_optimizer=server)
