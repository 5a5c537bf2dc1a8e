"""FedDyn: each client minimizes its loss with a penalty that changes with the rounds.

    client k    w_k = argmin F_k(w) - <g_k, w> + alpha / 2 |w - w_t|^2
                keeps g_k <- g_k - alpha (w_k - w_t)
    server      h <- h - alpha / m sum_{k in P} (w_k - w_t)
                w_{t+1} = 1 / |P| sum_{k in P} w_k - h / alpha

m is the number of all clients, and P is the cohort. Local training approximates the
minimum.

Source:
    Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew Mattina, Paul N.
    Whatmough, Venkatesh Saligrama: Federated Learning Based on Dynamic Regularization.
    ICLR 2021, https://arxiv.org/abs/2111.04263, Algorithm 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import ray_fed.tracebacks as tracebacks
from ray_fed.language.type_checks import read_whole
from ray_fed.learning.aggregators.aggregator import Aggregator, mean, with_sum
from ray_fed.learning.checks import check_positive
from ray_fed.learning.composition import Broadcast, Guards, build_process, send_weights
from ray_fed.learning.local_training import LocalTraining
from ray_fed.learning.models import Delta, Model, ModelWeights, expect_model
from ray_fed.learning.optimizers import OptimizerLike
from ray_fed.learning.processes import LearningProcess


class FedDynUpdate(NamedTuple):
    """The update of a client of FedDyn.

    Attributes:
        delta: Change of the client's weights.
        count: 1 if the client has examples, else 0. The server receives the sum.
    """

    delta: Delta
    count: Any


@tracebacks.shorten
def build_fed_dyn(
    model: Model,
    client_optimizer: OptimizerLike | None = None,
    *,
    alpha: float,
    num_clients: int,
    epochs: int = 1,
    aggregator: Aggregator | None = None,
    client_learning_rate: keras.optimizers.schedules.LearningRateSchedule | None = None,
    guards: Guards | None = None,
) -> LearningProcess:
    """Build FedDyn, whose clients keep a gradient of their own between rounds.

    Each client has the same weight, whatever its number of examples. A client without
    examples changes nothing. `next` takes and returns the clients' gradients as
    `build_scaffold` describes.

    For other arguments see `build_fed_avg`.

    Args:
        alpha: alpha of the paper, > 0: how strongly clients are pulled.
        num_clients: m of the paper: the number of all clients that ever take part,
            >= 1.
        aggregator: Aggregation of deltas, by default their unweighted mean.

    Raises:
        ValueMismatchError: The optimizer or the schedule is not one of Keras.
        ConfigError: A number is out of its range, or the aggregator adds noise.
    """
    expect_model(model)
    check_positive("alpha", alpha)
    read_whole("num_clients", num_clients, 1)
    train = LocalTraining(model, client_optimizer, epochs, client_learning_rate)
    zeros = tuple(map(np.zeros_like, model.initial_weights().trainable))

    def client(server: Broadcast, batches: Any, own: Any) -> Any:
        def regularize(gradients: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
            parts = zip(gradients, own, weights, server.weights.trainable, strict=True)
            return [g - g_k + alpha * (w - w_t) for g, g_k, w, w_t in parts]

        trained = train(
            server.weights,
            batches,
            correct=regularize,
            round_index=server.round_index,
        )
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

    return build_process(
        model,
        client=client,
        server=server,
        server_state=zeros,
        client_state=zeros,
        send=send_weights,
        aggregator=with_sum(aggregator or mean(weighted=False)),
        num_clients=num_clients,
        guards=guards,
        name=f"FedDyn({alpha:g})",
        settings={
            "client optimizer": train.optimizer,
            "epochs": epochs,
            "clients": num_clients,
        },
    )
