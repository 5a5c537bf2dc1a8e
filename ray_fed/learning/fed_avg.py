"""Federated averaging, with an optimizer at the server.

One round, on a cohort of clients k with n_k examples each:

    server state --broadcast--> w_k = local training from w       (client optimizer)
                                delta_k = w_k - w
    sum_k n_k delta_k / sum_k n_k --> minus the gradient of w      (server optimizer)

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

from typing import Any

import keras

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Model, expect_model
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec
from ray_fed.learning.processes import LearningProcess, with_facts


@tracebacks.shorten
def build_fed_avg(
    model: Model,
    client_optimizer: OptimizerLike,
    server_optimizer: OptimizerLike | None = None,
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
        ValueMismatchError: an optimizer, or a schedule, is not one of Keras.
        ConfigError: `epochs` is below 1.
    """
    expect_model(model)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    server = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))

    def client(broadcast: Broadcast, dataset: Any) -> Any:
        weights = broadcast.weights
        trained = train(weights, dataset, round_index=broadcast.round_index)
        num_examples = trained.num_examples
        return model.delta(weights, trained.weights), num_examples, trained.totals

    process = build_process(
        model,
        client=client,
        server=server,
        send=send_weights,
        aggregator=aggregator,
        guards=guards,
    )
    return with_facts(
        process,
        algorithm="federated averaging",
        client_optimizer=train.optimizer,
        server_optimizer=server,
        epochs=epochs,
    )
