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
from ray_fed.learning.processes import LearningProcess


@tracebacks.shorten
def build_fed_sgd(
    model: Model,
    server_optimizer: OptimizerLike,
    *,
    aggregator: Aggregator | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedSGD: each client sends the gradient over all of its data.

    The server takes one step per round. The running statistics of layers, as they are
    after each client's batches, are averaged over clients.

    For other arguments see `build_fed_avg`.

    Args:
        server_optimizer: Optimizer of the server, which receives the mean of the
            gradients: an optimizer of Keras, or its name. It is copied now.
        aggregator: Aggregation of gradients, by default their mean, weighted by the
            clients' numbers of examples.

    Raises:
        ValueMismatchError: The optimizer is not one of Keras, or has a setting that
            cannot work here as it does in `fit`. The error names the setting.
    """
    expect_model(model)
    server = OptimizerSpec.of(server_optimizer)

    def client(broadcast: Broadcast, dataset: Any) -> Any:
        gradient = model.full_gradient(broadcast.weights, dataset)
        # The server's optimizer takes a delta, which is minus a gradient.
        minus = tuple(-part for part in gradient.trainable)
        statistics = model.statistics_delta(broadcast.weights, gradient)
        totals = gradient.totals
        return Delta(minus, statistics), totals.num_examples, totals

    return build_process(
        model,
        client=client,
        server=server,
        send=send_weights,
        aggregator=aggregator,
        guards=guards,
        name="FedSGD",
        settings={"server optimizer": server},
    )
