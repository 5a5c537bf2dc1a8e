"""Federated stochastic gradient descent: clients send gradients, the server steps.

    g_k = grad F_k(w_t),   w_{t+1} = w_t - eta sum_k n_k / n g_k

Source:
    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS
    2017, PMLR 54:1273-1282, https://arxiv.org/abs/1602.05629, Section 2 (FedSGD).
"""

from typing import Any

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import Aggregator
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.models import Delta, Model, expect_model
from ray_fed.learning.optimizers import OptimizerLike, OptimizerSpec
from ray_fed.learning.processes import LearningProcess, with_facts


@tracebacks.shorten
def build_fed_sgd(
    model: Model,
    server_optimizer: OptimizerLike,
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
        ValueMismatchError: the optimizer is not one of Keras, or has a setting that
            cannot mean here what it does in `fit`; it is named.
    """
    expect_model(model)
    server = OptimizerSpec.of(server_optimizer)

    def client(broadcast: Broadcast, dataset: Any) -> Any:
        gradient = model.full_gradient(broadcast.weights, dataset)
        # The server's optimizer takes minus the gradient.
        minus = tuple(-part for part in gradient.trainable)
        statistics = model.statistics_delta(broadcast.weights, gradient)
        totals = gradient.totals
        return Delta(minus, statistics), totals.num_examples, totals

    process = build_process(
        model,
        client=client,
        server=server,
        send=send_weights,
        aggregator=aggregator,
        guards=guards,
    )
    return with_facts(process, algorithm="FedSGD", server_optimizer=server)
