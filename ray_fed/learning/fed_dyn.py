"""FedDyn: each client minimises its loss with a penalty that follows the rounds.

    client k    w_k = argmin F_k(w) - <g_k, w> + alpha / 2 |w - w_t|^2
                keeps g_k <- g_k - alpha (w_k - w_t)
    server      h <- h - alpha / m sum_{k in P} (w_k - w_t)
                w_{t+1} = 1 / |P| sum_{k in P} w_k - h / alpha

m are all clients, P the cohort. The minimum is looked for by local training.

Source:
    Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N.
    Whatmough, Venkatesh Saligrama: Federated Learning Based on Dynamic Regularization.
    ICLR 2021, https://arxiv.org/abs/2111.04263, Algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.learning.aggregators.aggregator import mean, with_sum
from ray_fed.learning.checks import check_positive, read_whole
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess, with_facts


class FedDynUpdate(NamedTuple):
    """What a client of FedDyn sends.

    Attributes:
        delta: of its weights.
        count: 1, which is summed.
    """

    delta: Delta
    count: Any


@tracebacks.shorten
def build_fed_dyn(
    model: Model,
    client_optimizer: OptimizerLike,
    *,
    alpha: float,
    num_clients: int,
    epochs: int = 1,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedDyn, whose clients keep a gradient of their own over rounds.

    Clients count the same, however many examples they have; one without any changes
    nothing. What clients keep is run as that of `build_scaffold` is.

    Args:
        model: to train.
        client_optimizer: as of `build_fed_avg`.
        alpha: of the paper, > 0: how strongly clients are pulled.
        num_clients: m of the paper: all that ever take part, >= 1.
        epochs: passes of each client over its data in a round, >= 1.
        guards: what broken updates and empty rounds do, by default `Guards()`.

    Raises:
        ValueMismatchError: the optimizer is not one of Keras.
        ConfigError: a number is out of its range.
    """
    expect_model(model)
    check_positive("alpha", alpha)
    read_whole("num_clients", num_clients, 1)
    train = LocalTraining(model, client_optimizer, epochs)
    zeros = tuple(map(np.zeros_like, model.initial_weights().trainable))

    def client(server: Broadcast, batches: Any, own: Any) -> Any:
        def regularise(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
            parts = zip(gradients, own, weights, server.weights.trainable, strict=True)
            return [g - g_k + alpha * (w - w_t) for g, g_k, w, w_t in parts]

        trained = train(server.weights, batches, correct=regularise)
        delta = model.delta(server.weights, trained.weights)
        moved = zip(own, delta.trainable, strict=True)
        new = tuple(g_k - alpha * d for g_k, d in moved)
        takes_part = tf.cast(trained.num_examples > 0, tf.float32)
        return FedDynUpdate(delta, takes_part), takes_part, trained.totals, new

    def server(weights: ModelWeights, h: Any, update: Any) -> Any:
        delta, count = update
        pairs = list(zip(h, delta.trainable, strict=True))
        share = alpha * count / num_clients
        h = tuple(part - tf.cast(share, d.dtype) * d for part, d in pairs)
        moved = tuple(
            d - part / alpha for part, d in zip(h, delta.trainable, strict=True)
        )
        return model.move(weights, delta._replace(trainable=moved)), h

    process = build_process(
        model,
        client=client,
        server=server,
        server_state=zeros,
        client_state=zeros,
        send=send_weights,
        aggregator=with_sum(mean(weighted=False)),
        num_clients=num_clients,
        guards=guards,
    )
    return with_facts(
        process,
        algorithm=f"FedDyn({alpha:g})",
        client_optimizer=train.optimizer,
        epochs=epochs,
        clients=num_clients,
    )
