"""Federated averaging, with an optimizer at the server.

One round, on a cohort of clients k with n_k examples each:

    server state --broadcast--> w_k = local training from w       (client optimizer)
                                delta_k = w_k - w
    sum_k n_k delta_k / sum_k n_k --> minus the gradient of w      (server optimizer)

With SGD at rate 1 at the server, the new weights are the average of the clients'
weights. The server's step is Algorithm 1 of Reddi et al. with weights n_k, and delta
has the same sign.

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
from ray_fed.learning.processes import LearningProcess


@tracebacks.shorten
def build_fed_avg(
    model: Model,
    client_optimizer: OptimizerLike | None = None,
    server_optimizer: OptimizerLike | None = None,
    *,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build federated averaging, weighted by the clients' numbers of examples.

    The process has two computations:

        initialize   ( -> ServerState@SERVER), with the Keras model's current weights
        next         (<ServerState@SERVER, model.data_type> ->
                      <ServerState@SERVER, metrics@SERVER>)

    The metrics are `loss`, `num_examples` (passes times examples) and the model's own.
    They are computed over all batches of all clients, and each batch is measured before
    its training step. Running statistics are averaged like weights. A round without
    examples changes no weight.

    Args:
        model: Model to train.
        client_optimizer: Optimizer of each client: an optimizer of Keras, or its name.
            It is copied now, and each client starts with a fresh copy. None: the
            optimizer that the Keras model was compiled with.
        server_optimizer: Optimizer of the server, which receives the negative average
            delta as the gradient. Its variables are part of the state. A schedule as
            its learning rate counts rounds. None: SGD with rate 1.
        epochs: Number of passes of each client over its data in a round, >= 1.
        aggregator: Aggregation of updates, by default their weighted mean.
        client_learning_rate: Learning rate of the clients by round. None: the rate of
            `client_optimizer`.
        guards: Handling of broken updates and empty rounds, by default `Guards()`.

    Raises:
        ValueMismatchError: An optimizer or a schedule is not one of Keras.
        ConfigError: `epochs` is below 1.
    """
    expect_model(model)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    server = OptimizerSpec.of(server_optimizer or keras.optimizers.SGD(1.0))

    def client(broadcast: Broadcast, dataset: Any, *, epochs: Any = None) -> Any:
        weights = broadcast.weights
        index = broadcast.round_index
        trained = train(weights, dataset, round_index=index, epochs=epochs)
        num_examples = trained.num_examples
        return model.delta(weights, trained.weights), num_examples, trained.totals

    return build_process(
        model,
        client=client,
        server=server,
        send=send_weights,
        aggregator=aggregator,
        guards=guards,
        name="federated averaging",
        settings={
            "client optimizer": train.optimizer,
            "server optimizer": server,
            "epochs": epochs,
        },
    )
