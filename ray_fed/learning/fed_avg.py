"""Federated averaging, with an optimiser at the server.

One round, on a cohort of clients k with n_k examples each:

    server state --broadcast--> w_k = local training from w       (client optimiser)
                                delta_k = w_k - w
    sum_k n_k delta_k / sum_k n_k --> minus the gradient of w      (server optimiser)

With SGD at rate 1 at the server this is the average of the clients' weights. The sign
of delta is that of Reddi et al.; their server step is Algorithm 1 with weights n_k.

FedProx pulls clients back to the server's weights: client k minimises
h_k(w; w_t) = F_k(w) + mu / 2 |w - w_t|^2, so that its steps are against
grad F_k(w) + mu (w - w_t).

Sources:
    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS
    2017, PMLR 54:1273-1282, https://arxiv.org/abs/1602.05629, Algorithm 1.

    Sashank J. Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub
    Konečný, Sanjiv Kumar, H. Brendan McMahan: Adaptive Federated Optimization. ICLR
    2021, https://arxiv.org/abs/2003.00295, Algorithms 1 and 2.

    Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar, Virginia
    Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
    https://arxiv.org/abs/1812.06127, Equation 2 and Algorithm 2.

Federated stochastic gradient descent: clients send gradients, the server steps.

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
from ray_fed.learning.checks import check_epochs, check_number
from ray_fed.learning.composition import ClientResult, Measured, build_process
from ray_fed.learning.guards import Guards
from ray_fed.learning.local_training import (
    Broadcast,
    Delta,
    LocalTraining,
    broadcast_type,
    build_training,
    full_gradient,
    measure_statistics,
    send_weights,
    stateless_client_part,
)
from ray_fed.learning.models import Model, expect_model
from ray_fed.learning.optimizers import OptimizerSpec
from ray_fed.learning.processes import LearningProcess, with_facts
from ray_fed.learning.server_update import build_server_update


@tracebacks.shorten
def build_fed_avg(
    model: Model,
    client_optimizer: keras.optimizers.Optimizer | str,
    server_optimizer: keras.optimizers.Optimizer | str | None = None,
    *,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build federated averaging, weighted by the clients' numbers of examples.

    The process holds

        initialize   ( -> ServerState@SERVER), with the Keras model's weights of now
        next         (<ServerState@SERVER, model.data_type> ->
                      <ServerState@SERVER, metrics@SERVER>)

    Metrics are those of the clients' training, each batch measured before its step:
    loss, num_examples (passes times examples), and the model's own. Running statistics
    are averaged like weights. A round without any example moves no weight.

    Args:
        model: to train.
        client_optimizer: of Keras, an object or a name, copied now; each client starts
            with a fresh one.
        server_optimizer: likewise; takes the average delta as minus the gradient. Its
            variables are part of the state. By default SGD with rate 1. A schedule as
            its learning rate counts rounds.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how updates become one, by default their weighted mean.
        client_learning_rate: of the clients by round; None: as `client_optimizer` says.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: an optimiser, or a schedule, is not one of Keras.
        ConfigError: `epochs` is below 1.
    """
    return _build(
        model,
        client_optimizer,
        server_optimizer,
        0.0,
        algorithm="federated averaging",
        epochs=epochs,
        aggregator=aggregator,
        client_learning_rate=client_learning_rate,
        guards=guards,
    )


@tracebacks.shorten
def build_fed_prox(
    model: Model,
    client_optimizer: keras.optimizers.Optimizer | str,
    server_optimizer: keras.optimizers.Optimizer | str | None = None,
    *,
    proximal: float,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedProx: `build_fed_avg` with a proximal term in the clients' loss.

    The metric `loss` is without that term.

    Args:
        model: to train.
        client_optimizer: as of `build_fed_avg`, like all that is not said here.
        server_optimizer: by default SGD with rate 1.
        proximal: mu of the paper, >= 0; 0 is federated averaging.
        epochs: passes of each client over its data in a round, >= 1.
        aggregator: how updates become one, by default their weighted mean.
        client_learning_rate: of the clients by round.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: an optimiser, or a schedule, is not one of Keras.
        ConfigError: `epochs` is below 1, or `proximal` below 0.
    """
    check_number("proximal", proximal, lambda mu: mu >= 0, "to be at least 0")
    return _build(
        model,
        client_optimizer,
        server_optimizer,
        float(proximal),
        algorithm=f"FedProx({proximal:g})",
        epochs=epochs,
        aggregator=aggregator,
        client_learning_rate=client_learning_rate,
        guards=guards,
    )


def _build(
    model: Model,
    client_optimizer: Any,
    server_optimizer: Any,
    proximal: float,
    *,
    algorithm: str,
    epochs: int,
    aggregator: Aggregator | None,
    client_learning_rate: Any,
    guards: Guards | None,
) -> LearningProcess:
    expect_model(model)
    client = OptimizerSpec(client_optimizer)
    training = LocalTraining(
        client, check_epochs(epochs), client_learning_rate, proximal
    )
    if server_optimizer is None:
        server_optimizer = keras.optimizers.SGD(1.0)
    server = OptimizerSpec(server_optimizer)
    finalize = build_server_update(model, server)
    process = build_process(
        model,
        distribute=send_weights(model, finalize),
        client_work=build_training(model, training),
        aggregate=inner_or_mean(aggregator),
        finalize=finalize,
        guards=guards,
    )
    return with_facts(
        process,
        algorithm=algorithm,
        client_optimizer=client,
        server_optimizer=server,
        epochs=epochs,
    )


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
